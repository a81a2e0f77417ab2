"""Serve an exported classifier over HTTP; pictures that arrive together are computed together.

    gtp-vit export vit_tiny_patch16_224 --pretrained --format onnx --output exported
    python examples/serve.py exported/vit_tiny_patch16_224-gtp_plus-f32.onnx
    curl --data-binary @cat.jpg http://127.0.0.1:8000/classify

It needs neither torch nor gtp-vit: pip install fastapi uvicorn onnxruntime numpy pillow
"""

import argparse
import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from PIL import Image, ImageOps

MOST_BYTES, MOST_PIXELS = 20_000_000, 50_000_000  # of a picture
LARGEST_BATCH, WAIT, MOST_WAITING = 8, 0.005, 64  # pictures; seconds for others to arrive; pictures in the queue


class Batcher:
    """Collects pictures for a few milliseconds and computes them as one batch."""

    def __init__(self, compute: Callable[[np.ndarray], np.ndarray]) -> None:
        self.compute = compute
        self.queue: asyncio.Queue[tuple[np.ndarray, asyncio.Future]] = asyncio.Queue(MOST_WAITING)

    async def __call__(self, image: np.ndarray) -> tuple[np.ndarray, int]:
        """The output for one picture, and with how many others it was computed."""
        future = asyncio.get_running_loop().create_future()
        try:
            self.queue.put_nowait((image, future))
        except asyncio.QueueFull:
            raise HTTPException(503, "too many pictures are waiting; try again", {"Retry-After": "1"}) from None
        return await future

    async def run(self) -> None:
        while True:
            batch = [await self.queue.get()]
            await asyncio.sleep(WAIT)
            while len(batch) < LARGEST_BATCH and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            try:
                outputs = await asyncio.to_thread(self.compute, np.stack([image for image, _ in batch]))
            except Exception as error:  # of the engine; the next batch may be fine
                for _, future in batch:
                    if not future.done():  # whoever asked may be gone
                        future.set_exception(HTTPException(500, f"the model failed: {type(error).__name__}"))
                continue
            for (_, future), output in zip(batch, outputs, strict=True):
                if not future.done():
                    future.set_result((output, len(batch)))


def prepare(data: bytes, wanted: dict[str, Any]) -> np.ndarray:
    """A picture as the model wants it: the description inside the file says how."""
    try:
        picture = Image.open(io.BytesIO(data))
        if picture.width * picture.height > MOST_PIXELS:
            raise HTTPException(413, f"{picture.width} x {picture.height} pixels; at most {MOST_PIXELS} are taken")
        if max(picture.size) > 100 * min(picture.size):
            raise HTTPException(415, f"{picture.width} x {picture.height} pixels: too narrow to be cut to a square")
        if picture.mode.startswith(("I", "F")):
            raise HTTPException(415, "its values have more than 8 bits; convert it first")
        picture = ImageOps.exif_transpose(picture)  # as it was held
        picture = picture.convert("L").convert("RGB") if wanted["channels"] == 1 else picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise HTTPException(415, f"this is not a picture that can be read: {error}") from error
    height, width = wanted["size"]
    resample = Image.Resampling[wanted.get("interpolation", "bicubic").upper()]
    if wanted.get("crop_mode") == "squash":
        picture = picture.resize((width, height), resample)
    else:
        side = int(min(height, width) / wanted.get("crop_pct", 1))
        short = min(picture.size)
        picture = picture.resize(tuple(int(side * each / short) for each in picture.size), resample)
        left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
        picture = picture.crop((left, top, left + width, top + height))
    pixels = np.asarray(picture, np.float32)[:, :, : wanted["channels"]] / 255
    pixels = (pixels - np.float32(wanted["mean"])) / np.float32(wanted["std"])
    return pixels.transpose(2, 0, 1)


def make_app(path: Path) -> FastAPI:
    """The server of one file."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads leave the cores to others
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    stored = session.get_modelmeta().custom_metadata_map.get("gtp_vit")
    if stored is None:
        raise ValueError("it was not made by gtp-vit export, so nothing says how to prepare pictures")
    about = json.loads(stored)
    if about["output"]["kind"] != "classes" or "mean" not in about["input"]:
        raise ValueError(f"it returns {about['output']['kind']}; a classifier with its own preparation is needed")
    names = about["classes"] or [str(index) for index in range(about["output"]["width"])]
    batcher = Batcher(lambda images: session.run(None, {"images": images})[0])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(batcher.run())
        yield
        work.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/")
    def describe() -> dict[str, Any]:
        return {"model": about["model"], "method": about["method"], "share of MACs": about["macs"]["share"]}

    @app.post("/classify")
    async def classify(request: Request) -> dict[str, Any]:
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > MOST_BYTES:
                raise HTTPException(413, f"at most {MOST_BYTES} bytes are taken")
        image = await asyncio.to_thread(prepare, bytes(data), about["input"])
        logits, together = await batcher(image)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        first = [{"class": names[index], "probability": float(shares[index])} for index in np.argsort(-shares)[:5]]
        return {"classes": first, "computed together": together}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a classifier that gtp-vit export --format onnx wrote")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from other machines")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    try:
        app = make_app(args.file)
    except Exception as error:  # the engine raises errors of many classes
        sys.exit(f"serve.py: {args.file} cannot be served: {str(error).splitlines()[0]}")
    uvicorn.run(app, host=args.host, port=args.port)


if __name__ == "__main__":
    main()
