"""Classify all pictures of a folder with a reduced model: a line for each, with its class and probability.

    python examples/classify.py photos
    python examples/classify.py photos --model deit_small_patch16_224 --csv classes.csv

Pictures that cannot be read are named at the end, and the exit code is 3 then.
"""

import argparse
import csv
import sys
from pathlib import Path

import timm.data

import gtp_vit
from gtp_vit.errors import printable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="pictures, also in folders below it")
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="a classifier; gtp-vit models lists them")
    parser.add_argument("--checkpoint", type=Path, help="a file of weights instead of the pre-trained ones")
    parser.add_argument("--names", type=Path, help="a text file with a class name in each line; else ImageNet's")
    parser.add_argument("--csv", type=Path, help="write a table instead of lines")
    args = parser.parse_args()
    try:
        model = gtp_vit.create_model(args.model, pretrained=args.checkpoint is None, checkpoint=args.checkpoint)
        fast = gtp_vit.patch(model)  # two thirds of the work, nearly the same answers
        names = args.names.read_text().splitlines() if args.names else None
        rows, problems = [], []
        for batch in gtp_vit.embed(fast, args.folder):  # of a classifier, the scores of its classes
            best = batch.embeddings.softmax(-1).max(-1)
            for name, index, share in zip(batch.names, best.indices.tolist(), best.values.tolist(), strict=True):
                rows.append([name, class_name(index, batch.embeddings.shape[1], names), f"{share:.4f}"])
                if not args.csv:
                    print(printable("\t".join(rows[-1])))
            problems += [*batch.unreadable.values(), *batch.not_finite.values()]
        if args.csv:
            with args.csv.open("w", newline="") as file:
                csv.writer(file).writerows([["picture", "class", "probability"], *rows])
    except (gtp_vit.GTPError, OSError, ValueError) as error:
        sys.exit(printable(f"classify.py: {error}"))
    for problem in problems:
        print(printable(f"classify.py: left out: {problem}"), file=sys.stderr)
    return 3 if problems else 0


def class_name(index: int, count: int, names: list[str] | None) -> str:
    if names is not None:
        if len(names) != count:
            raise ValueError(f"{len(names)} class names are given, and the model has {count} classes; give one each")
        return names[index]
    return timm.data.ImageNetInfo().index_to_description(index) if count == 1000 else str(index)


if __name__ == "__main__":
    sys.exit(main())
