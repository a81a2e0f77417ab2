"""Embed the pictures of a folder with Daft to Parquet.

pip install 'gtp-vit[daft]'
python examples/embed_with_daft.py photos vectors
"""

import argparse

import daft
import pyarrow
from daft.functions import download

import gtp_vit


def column(embed: gtp_vit.Embedder, workers: int, batch_size: int) -> object:
    """An Embedder as a function of a column, which gives a struct of the embedding and the reason why there is none."""
    kind = daft.DataType.from_arrow_type(pyarrow.struct(list(embed.schema())))

    @daft.cls(max_concurrency=workers, use_process=True)
    class Column:
        def __init__(self) -> None:
            self.embed = embed

        @daft.method.batch(return_dtype=kind, unnest=True, batch_size=batch_size)
        def __call__(self, images: daft.Series) -> pyarrow.Array:
            table = self.embed(pyarrow.table({self.embed.image: images.to_arrow()}))
            added = [table[field.name].combine_chunks() for field in self.embed.schema()]
            return pyarrow.StructArray.from_arrays(added, fields=list(self.embed.schema()))

    return Column()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="pictures, here or in a store: s3://, gs://, hf://, ...")
    parser.add_argument("output", help="folder for the files")
    parser.add_argument("--model", default="vit_small_patch16_224.dino", help="as for gtp-vit embed")
    parser.add_argument("--workers", type=int, default=2, help="processes; each has a model")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    embed = gtp_vit.Embedder(args.model, batch_size=args.batch_size, threads=1)
    embedding = column(embed, args.workers, args.batch_size)
    pictures = daft.from_glob_path(f"{args.folder}/**").select("path")
    pictures = pictures.with_column("image", download(daft.col("path"), on_error="null"))
    pictures.select("path", embedding(daft.col("image"))).write_parquet(args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
