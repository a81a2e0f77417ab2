"""Embed the pictures of a folder with Ray Data, in a pool of actors, to Parquet.

pip install 'gtp-vit[ray]'
python examples/embed_with_ray.py photos vectors
"""

import argparse

import pyarrow
import ray

import gtp_vit


class OnWorker:
    """What an actor is: the Embedder that the driver sent, which loads its model at the first batch."""

    def __init__(self, embed: gtp_vit.Embedder) -> None:
        self.embed = embed

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        return self.embed(batch).drop_columns([self.embed.image])  # the pictures themselves are not written again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="pictures, here or in a store: s3://, gs://, ...")
    parser.add_argument("output", help="folder for the files")
    parser.add_argument("--model", default="vit_small_patch16_224.dino", help="as for gtp-vit embed")
    parser.add_argument("--workers", type=int, default=2, help="actors, at most; each has a model and a core")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    embed = gtp_vit.Embedder(args.model, image="bytes", batch_size=args.batch_size)
    ray.data.read_binary_files(args.folder, include_paths=True).map_batches(
        OnWorker,
        fn_constructor_args=(embed,),
        batch_size=args.batch_size,
        batch_format="pyarrow",  # numpy batches have no null
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=args.workers),  # reading needs a core, too
        num_cpus=1,
    ).write_parquet(args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
