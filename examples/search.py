"""Find the pictures that are most like a given one, by the embeddings of a reduced encoder.

    python examples/search.py photos cat.jpg

embeds the folder each time. For many pictures do that once, with the same model, and search in the files:

    gtp-vit embed vit_small_patch16_224.dino --pretrained --data-dir photos --normalise --output vectors
    python examples/search.py vectors cat.jpg
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import timm.data
import torch

import gtp_vit
from gtp_vit.data.image_file import open_picture
from gtp_vit.errors import printable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="pictures, or what gtp-vit embed --normalise wrote")
    parser.add_argument("query", type=Path, help="a picture")
    parser.add_argument("--model", default="vit_small_patch16_224.dino", help="a model of timm's")
    parser.add_argument("--checkpoint", type=Path, help="a file of weights instead of the pre-trained ones")
    parser.add_argument("--count", type=int, default=5, help="how many pictures to show")
    args = parser.parse_args()
    try:
        encoder = gtp_vit.create_model(
            args.model, pretrained=args.checkpoint is None, checkpoint=args.checkpoint, num_classes=0
        )
        fast = gtp_vit.patch(encoder)
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(encoder))
        query = transform(open_picture(args.query))[None]
        (wanted,) = gtp_vit.embed(fast, query, normalise=True)
        names, found = [], []
        for some, vectors in embeddings(fast, args.folder):
            if vectors.shape[1:] != wanted.embeddings.shape[1:]:
                raise gtp_vit.GTPError(f"{args.folder} was embedded by another model; name it with --model")
            names += some
            found.append(vectors)
    except gtp_vit.GTPError as error:
        sys.exit(printable(f"search.py: {error}"))
    if not names:
        sys.exit(f"search.py: {args.folder} has no picture that can be read")
    cosines = torch.cat(found).float() @ wanted.embeddings[0]  # all vectors have length 1
    for index in cosines.argsort(descending=True)[: max(args.count, 1)].tolist():
        print(printable(f"{cosines[index]:.4f}\t{names[index]}"))
    return 0


def embeddings(fast: torch.nn.Module, folder: Path) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Names and vectors of length 1: of files that are there, or of pictures."""
    if (folder / "manifest.json").is_file():
        for shard in gtp_vit.read_embeddings(folder):
            yield tuple(shard.names), torch.nn.functional.normalize(torch.as_tensor(shard.embeddings).float(), dim=-1)
        return
    for batch in gtp_vit.embed(fast, folder, normalise=True):
        yield batch.names, batch.embeddings
        for problem in [*batch.unreadable.values(), *batch.not_finite.values()]:
            print(printable(f"search.py: left out: {problem}"), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
