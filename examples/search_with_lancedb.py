"""Find pictures in a LanceDB table that embeds them by itself, when rows are added and when it is searched.

pip install 'gtp-vit[lance]'
python examples/search_with_lancedb.py photos database cat.jpg
"""

import argparse
import functools
from pathlib import Path

import lancedb
from lancedb.embeddings import EmbeddingFunction, register
from lancedb.pydantic import LanceModel, Vector

import gtp_vit


@functools.cache
def encoder(model: str) -> gtp_vit.Embedder:
    return gtp_vit.Embedder(model, normalise=True)


@register("gtp-vit")
class Pictures(EmbeddingFunction):
    """gtp-vit as LanceDB's tables name it; the name of the model is stored with the table."""

    model: str

    def ndims(self) -> int:
        return encoder(self.model).dimensions

    def compute_source_embeddings(self, images: list[object], *_: object, **__: object) -> list[object]:
        vectors, errors = encoder(self.model).vectors(list(images))
        return [vector if error is None else None for vector, error in zip(vectors, errors, strict=True)]

    def compute_query_embeddings(self, query: object, *_: object, **__: object) -> list[object]:
        (vector,), (error,) = encoder(self.model).vectors([query])
        if error is not None:
            raise ValueError(f"the query cannot be read: {error}")
        return [vector]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="pictures")
    parser.add_argument("database", type=Path, help="folder of a LanceDB database")
    parser.add_argument("query", type=Path, help="a picture")
    parser.add_argument("--model", default="vit_small_patch16_224.dino", help="as for gtp-vit embed")
    parser.add_argument("--count", type=int, default=5, help="how many pictures to show")
    args = parser.parse_args()
    pictures = Pictures.create(model=args.model)

    class Row(LanceModel):
        path: str
        image: bytes = pictures.SourceField()
        vector: Vector(pictures.ndims(), nullable=True) = pictures.VectorField()  # type: ignore[valid-type]

    database = lancedb.connect(args.database)
    if "pictures" in database.list_tables().tables:
        table = database.open_table("pictures")
    else:
        table = database.create_table("pictures", schema=Row)
        paths = sorted(path for path in args.folder.rglob("*") if path.is_file())
        table.add([{"path": str(path), "image": path.read_bytes()} for path in paths], on_bad_vectors="null")
    found = table.search(args.query.read_bytes()).distance_type("cosine").limit(args.count).to_list()
    for row in found:
        print(f"{1 - row['_distance']:.4f}\t{row['path']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
