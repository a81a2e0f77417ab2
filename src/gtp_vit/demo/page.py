"""page: the layout of the demo, and what happens when somebody changes something.

Gradio is an extra, so it is imported when a page is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtp_vit.demo.demo_model import HIGHEST, LOWEST, Subject, python_for, recipe_at
from gtp_vit.demo.exported_model import Filed, look_at_file
from gtp_vit.demo.inspection import look, time_columns
from gtp_vit.demo.markup import file_html, message_html, study_html
from gtp_vit.demo.upload import read_upload
from gtp_vit.errors import GTPError
from gtp_vit.recipes.defaults import DEFAULT, DEFAULT_SHARE

FOLDER = Path(__file__).parent
NONE = "none"
SECOND = "tome"
MOST_WAITING = 64  # in the queue; others are told that it is full
LOOKED_AT, KEPT = 600, 3600  # seconds: how often uploads are looked at, and how old they get
EMPTY = "Upload, paste or take a picture, or choose an example."
# One at a time: two would disturb each other's times. Of somebody who moves on, only the last wish counts.
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "model"}


def build(subject: Subject | Filed) -> Any:
    """The page, not yet served."""
    import gradio as gr

    with gr.Blocks(
        analytics_enabled=False, title=f"gtp-vit: {subject.name}", delete_cache=(LOOKED_AT, KEPT), fill_width=False
    ) as page:
        gr.Markdown(
            f"# {subject.name}, with fewer tokens\n"
            "What a method keeps of a picture, what it changes, and what it saves. Nothing leaves this machine."
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                start = subject.examples[0].picture if subject.examples else None
                picture = _upload(gr, start)
                _gallery(gr, subject, picture)
            with gr.Column(scale=3, min_width=300):
                first, second, share = _choices(gr, subject)
                text = "Give me the recipe" if isinstance(subject, Subject) else "Give me the Python"
                button = gr.Button(text, elem_id="gtp-recipe-button")
                python, recipe, given = _recipe_room(gr, subject)
        script = (FOLDER / "page.js").read_text(encoding="utf-8")
        shown = gr.HTML(message_html(EMPTY), elem_id="gtp-study", elem_classes=["gtp"], js_on_load=script)
        if isinstance(subject, Subject) and subject.left_out:
            gr.Markdown("Not for this model: " + "; ".join(subject.left_out))

        def answer(
            path: str | None,
            one: str,
            other: str,
            percent: float,
            progress: Any = gr.Progress(),  # noqa: B008  Gradio looks for it there
        ) -> Iterator[str]:
            yield from _answer(subject, path, [one, other], percent, progress)

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
            return gr.Column(visible=True), *_recipe(subject, one, percent)

        button.click(give, [first, share], [given, python, recipe], api_name="recipe", **ONE_AT_A_TIME)
        # A recipe of other settings than those on the page would be wrong.
        hide = {"outputs": given, "queue": False, "show_progress": "hidden", "api_visibility": "private"}
        gr.on([first.change, share.change], lambda: gr.Column(visible=False), **hide)
    return page.queue(max_size=MOST_WAITING, default_concurrency_limit=1)


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


def _gallery(gr: Any, subject: Subject | Filed, picture: Any) -> None:
    """Examples to start with; choosing one puts it where pictures come in."""
    if not subject.examples:
        return
    gallery = gr.Gallery(
        [(example.picture, example.name) for example in subject.examples],
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
        return subject.examples[event.index].picture

    choose.__annotations__["event"] = gr.SelectData  # annotations are texts in this file, and gr is not global
    gallery.select(choose, None, picture, queue=False, show_progress="hidden", api_visibility="private")


def _choices(gr: Any, subject: Subject | Filed) -> tuple[Any, Any, Any]:
    """Method, method beside it, and share of the MACs; a file has its own."""
    free = isinstance(subject, Subject)
    names = list(subject.methods) if isinstance(subject, Subject) else ["as in the file"]
    start = DEFAULT.name if DEFAULT.name in names else names[0]
    beside = [NONE, *names] if free else [NONE]
    own = DEFAULT_SHARE if isinstance(subject, Subject) else subject.file.metadata.share
    share = gr.Slider(
        *(round(100 * LOWEST), round(100 * HIGHEST), round(100 * own)),
        step=1,
        label="Share of the MACs, in percent" if free else "Share of the MACs, as in the file",
        interactive=free,
        buttons=[],
        elem_id="gtp-share",
    )
    with gr.Row():
        first = gr.Dropdown(names, value=start, label="Method", interactive=free, min_width=130, elem_id="gtp-first")
        other = SECOND if SECOND in beside else NONE
        second = gr.Dropdown(
            beside, value=other, label="Beside it", interactive=free, min_width=130, elem_id="gtp-second"
        )
    return first, second, share


def _recipe_room(gr: Any, subject: Subject | Filed) -> tuple[Any, Any, Any]:
    """Where the lines of Python and the recipe appear."""
    copied = {"interactive": False, "buttons": ["copy", "download"]}
    with gr.Column(visible=False, elem_id="gtp-given") as given:
        python = gr.Code(language="python", label="In Python", lines=2, elem_id="gtp-python", **copied)
        recipe = gr.Code(
            language="json",
            label="recipe.json",
            lines=4,
            max_lines=10,
            visible=isinstance(subject, Subject),
            elem_id="gtp-recipe",
            **copied,
        )
    return python, recipe, given


def _recipe(subject: Subject | Filed, name: str, percent: float) -> tuple[str, str]:
    if isinstance(subject, Filed):
        return subject.python, ""
    try:
        return python_for(subject), recipe_at(subject, name, percent / 100).to_json()
    except GTPError as error:
        raise _shown(error) from error


def _answer(
    subject: Subject | Filed, path: str | None, names: list[str], percent: float, progress: Any
) -> Iterator[str]:
    """The study of what was asked for: first without times, then with them."""
    if path is None:
        yield message_html(EMPTY)
        return

    def rounds(done: int, total: int) -> None:
        progress((done, total), desc="measuring the speed", unit="rounds")

    try:
        picture, notes = read_upload(path)
        if isinstance(subject, Filed):
            yield file_html(subject, look_at_file(subject, picture, timed=False), notes)
            yield file_html(subject, look_at_file(subject, picture, timed=True, progress=rounds), notes)
            return
        study = look(subject, picture, [name for name in names if name != NONE], percent / 100)
        yield study_html(subject, study, notes, None)
        timings, count = time_columns(subject, study, rounds)
        yield study_html(subject, study, notes, timings, count)
    except GTPError as error:
        yield message_html(str(error))  # what was there before was of another picture or method


def _shown(error: GTPError) -> Exception:
    """An error as Gradio shows it."""
    import gradio as gr

    return gr.Error(str(error), print_exception=False)
