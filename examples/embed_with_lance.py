"""Add embeddings to a Lance table of pictures; a run that was stopped goes on from its checkpoint file.

pip install 'gtp-vit[lance]'
python examples/embed_with_lance.py photos photos.lance
"""

import argparse
from pathlib import Path

import lance
import pyarrow

import gtp_vit


def make_table(folder: Path, output: Path) -> None:
    """A table of the pictures of a folder."""
    schema = pyarrow.schema([("path", pyarrow.string()), ("image", pyarrow.binary())])
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    batches = (pyarrow.record_batch([[str(path)], [path.read_bytes()]], schema=schema) for path in paths)
    lance.write_dataset(batches, output, schema=schema)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="pictures")
    parser.add_argument("table", type=Path, help="Lance table; it is made of the pictures if it is not there")
    parser.add_argument("--model", default="vit_small_patch16_224.dino", help="as for gtp-vit embed")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    if not args.table.exists():
        make_table(args.folder, args.table)
    embed = gtp_vit.Embedder(args.model, batch_size=args.batch_size, fixed_size=True)
    checkpoint = args.table.with_suffix(".checkpoint")

    @lance.batch_udf(output_schema=embed.schema(), checkpoint_file=checkpoint)
    def add(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        return embed(batch).select(embed.schema().names)

    lance.dataset(args.table).add_columns(add, read_columns=["image"], batch_size=args.batch_size)
    checkpoint.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
