"""page: the layout of the demo, and what happens when somebody changes something.

Gradio is an extra, so it is imported when a page is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtp_vit.demo.demo_model import MAX_FRACTION, MIN_FRACTION, DemoModel, python_for, recipe_at
from gtp_vit.demo.exported_model import ExportedSubject, inspect_file
from gtp_vit.demo.inspection import inspect_picture, time_columns
from gtp_vit.demo.markup import file_html, inspection_html, message_html
from gtp_vit.demo.upload import read_upload
from gtp_vit.errors import GTPError
from gtp_vit.recipes.defaults import DEFAULT_FRACTION, DEFAULT_METHOD

FOLDER = Path(__file__).parent
NO_METHOD = "none"
DEFAULT_RIVAL = "tome"
MAX_QUEUE = 64  # in the queue; others are told that it is full
CLEANUP_INTERVAL, MAX_AGE = 600, 3600  # seconds: how often uploads are looked at, and how old they get
EMPTY_HINT = "Upload, paste or take a picture, or choose an example."
# One at a time: two would disturb each other's times. Of somebody who moves on, only the last wish counts.
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "model"}


def build(demo_model: DemoModel | ExportedSubject) -> Any:
    """The page, not yet served."""
    import gradio as gr

    with gr.Blocks(
        analytics_enabled=False,
        title=f"gtp-vit: {demo_model.name}",
        delete_cache=(CLEANUP_INTERVAL, MAX_AGE),
        fill_width=False,
    ) as page:
        gr.Markdown(
            f"# {demo_model.name}, with fewer tokens\n"
            "What a method keeps of a picture, what it changes, and what it saves. Nothing leaves this machine."
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                start = demo_model.examples[0].picture if demo_model.examples else None
                picture = _upload(gr, start)
                _gallery(gr, demo_model, picture)
            with gr.Column(scale=3, min_width=300):
                first, second, share = _choices(gr, demo_model)
                text = "Give me the recipe" if isinstance(demo_model, DemoModel) else "Give me the Python"
                button = gr.Button(text, elem_id="gtp-recipe-button")
                python, recipe, recipe_column = _recipe_panel(gr, demo_model)
        script = (FOLDER / "page.js").read_text(encoding="utf-8")
        shown = gr.HTML(message_html(EMPTY_HINT), elem_id="gtp-study", elem_classes=["gtp"], js_on_load=script)
        if isinstance(demo_model, DemoModel) and demo_model.left_out:
            gr.Markdown("Not for this model: " + "; ".join(demo_model.left_out))

        def answer(
            path: str | None,
            one: str,
            other: str,
            percent: float,
            progress: Any = gr.Progress(),  # noqa: B008  Gradio looks for it there
        ) -> Iterator[str]:
            yield from _answer(demo_model, path, [one, other], percent, progress)

        gr.on(
            [page.load, picture.change, first.change, second.change, share.change],
            answer,
            [picture, first, second, share],
            shown,
            trigger_mode="always_last",
            show_progress="minimal",
            api_name="look",
            **ONE_AT_A_TIME,
        )

        def give(one: str, percent: float) -> tuple[Any, str, str]:
            return gr.Column(visible=True), *_recipe(demo_model, one, percent)

        button.click(give, [first, share], [recipe_column, python, recipe], api_name="recipe", **ONE_AT_A_TIME)
        # A recipe of other settings than those on the page would be wrong.
        hide = {"outputs": recipe_column, "queue": False, "show_progress": "hidden", "api_visibility": "private"}
        gr.on([first.change, share.change], lambda: gr.Column(visible=False), **hide)
    return page.queue(max_size=MAX_QUEUE, default_concurrency_limit=1)


def _upload(gr: Any, start: Any) -> Any:
    """Where pictures come in. They are read by `read_upload` only, and never fetched from an address."""

    picture = gr.Image(
        value=start,
        format="png",
        type="filepath",
        sources=["upload", "clipboard", "webcam"],
        label="Picture",
        buttons=[],
        height=260,
        elem_id="gtp-upload",
    )
    move = picture.async_move_resource_to_block_cache

    async def only_uploads(path: Any) -> Any:
        """Called with whatever a browser names, before it is copied to where uploads lie."""
        if "://" in str(path) or not Path(path).resolve().is_relative_to(Path(picture.GRADIO_CACHE).resolve()):
            raise gr.Error(
                "Pictures are uploaded, pasted or taken; other files and addresses are not opened.",
                print_exception=False,
            )
        return await move(path)

    # On this one object: Gradio writes a file beside the source of every subclass of its components.
    picture.async_move_resource_to_block_cache = only_uploads
    picture.preprocess = lambda payload: None if payload is None else payload.path
    return picture


def _gallery(gr: Any, demo_model: DemoModel | ExportedSubject, picture: Any) -> None:
    """Examples to start with; choosing one puts it where pictures come in."""
    if not demo_model.examples:
        return
    gallery = gr.Gallery(
        [(example.picture, example.name) for example in demo_model.examples],
        label="Examples",
        format="png",
        columns=8,
        height=170,
        object_fit="contain",
        allow_preview=False,
        interactive=False,
        buttons=[],
        elem_id="gtp-examples",
    )

    def choose(event: gr.SelectData) -> Any:
        return demo_model.examples[event.index].picture

    choose.__annotations__["event"] = gr.SelectData  # annotations are texts in this file, and gr is not global
    gallery.select(choose, None, picture, queue=False, show_progress="hidden", api_visibility="private")


def _choices(gr: Any, demo_model: DemoModel | ExportedSubject) -> tuple[Any, Any, Any]:
    """Method, method beside it, and share of the MACs; a file has its own."""
    free = isinstance(demo_model, DemoModel)
    names = list(demo_model.methods) if isinstance(demo_model, DemoModel) else ["as in the file"]
    start = DEFAULT_METHOD.name if DEFAULT_METHOD.name in names else names[0]
    beside = [NO_METHOD, *names] if free else [NO_METHOD]
    own = DEFAULT_FRACTION if isinstance(demo_model, DemoModel) else demo_model.file.metadata.macs_ratio
    share = gr.Slider(
        *(round(100 * MIN_FRACTION), round(100 * MAX_FRACTION), round(100 * own)),
        step=1,
        label="Share of the MACs, in percent" if free else "Share of the MACs, as in the file",
        interactive=free,
        buttons=[],
        elem_id="gtp-share",
    )
    with gr.Row():
        first = gr.Dropdown(names, value=start, label="Method", interactive=free, min_width=130, elem_id="gtp-first")
        other = DEFAULT_RIVAL if DEFAULT_RIVAL in beside else NO_METHOD
        second = gr.Dropdown(
            beside, value=other, label="Beside it", interactive=free, min_width=130, elem_id="gtp-second"
        )
    return first, second, share


def _recipe_panel(gr: Any, demo_model: DemoModel | ExportedSubject) -> tuple[Any, Any, Any]:
    """Where the lines of Python and the recipe appear."""
    copied = {"interactive": False, "buttons": ["copy", "download"]}
    with gr.Column(visible=False, elem_id="gtp-given") as column:
        python = gr.Code(language="python", label="In Python", lines=2, elem_id="gtp-python", **copied)
        recipe = gr.Code(
            language="json",
            label="recipe.json",
            lines=4,
            max_lines=10,
            visible=isinstance(demo_model, DemoModel),
            elem_id="gtp-recipe",
            **copied,
        )
    return python, recipe, column


def _recipe(demo_model: DemoModel | ExportedSubject, name: str, percent: float) -> tuple[str, str]:
    if isinstance(demo_model, ExportedSubject):
        return demo_model.python, ""
    try:
        return python_for(demo_model), recipe_at(demo_model, name, percent / 100).to_json()
    except GTPError as error:
        raise _as_gradio_error(error) from error


def _answer(
    demo_model: DemoModel | ExportedSubject, path: str | None, names: list[str], percent: float, progress: Any
) -> Iterator[str]:
    """The study of what was asked for: first without times, then with them."""
    if path is None:
        yield message_html(EMPTY_HINT)
        return

    def rounds(done: int, total: int) -> None:
        progress((done, total), desc="measuring the speed", unit="rounds")

    try:
        picture, notes = read_upload(path)
        if isinstance(demo_model, ExportedSubject):
            yield file_html(demo_model, inspect_file(demo_model, picture, timed=False), notes)
            yield file_html(demo_model, inspect_file(demo_model, picture, timed=True, progress=rounds), notes)
            return
        study = inspect_picture(demo_model, picture, [name for name in names if name != NO_METHOD], percent / 100)
        yield inspection_html(demo_model, study, notes, None)
        timings, count = time_columns(demo_model, study, rounds)
        yield inspection_html(demo_model, study, notes, timings, count)
    except GTPError as error:
        yield message_html(str(error))  # what was there before was of another picture or method


def _as_gradio_error(error: GTPError) -> Exception:
    """An error as Gradio shows it."""
    import gradio as gr

    return gr.Error(str(error), print_exception=False)
