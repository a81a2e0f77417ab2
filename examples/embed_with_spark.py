"""Embed the pictures of a folder with Spark to Parquet.

pip install 'gtp-vit[spark]'
python examples/embed_with_spark.py photos vectors
"""

import argparse
import os
import sys
from collections.abc import Iterator

import pyarrow
from pyspark.sql import SparkSession

import gtp_vit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="pictures, here or in a store: s3a://, gs://, hdfs://, ...")
    parser.add_argument("output", help="folder for the files")
    parser.add_argument("--model", default="vit_small_patch16_224.dino", help="as for gtp-vit embed")
    parser.add_argument("--workers", type=int, default=2, help="cores of this machine, where Spark runs here alone")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers run whichever python3 is first in PATH
    session = (
        SparkSession.builder.master(f"local[{args.workers}]")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", args.batch_size)
        .config("spark.python.worker.reuse", "true")  # so that a worker loads its model once
        .getOrCreate()
    )
    embed = gtp_vit.Embedder(args.model, image="content", batch_size=args.batch_size, threads=1)

    def rows(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            yield embed(batch).select(["path", "embedding", "embedding_error"])

    pictures = session.read.format("binaryFile").option("recursiveFileLookup", "true").load(args.folder)
    columns = "path string, embedding array<float>, embedding_error string"
    pictures.select("path", "content").mapInArrow(rows, columns).write.mode("overwrite").parquet(args.output)
    session.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
