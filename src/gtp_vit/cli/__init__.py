"""The command gtp-vit. A command is a module of its name and a line in `app.COMMANDS`; what commands share is here:

- `app`: the commands, errors and exit codes.
- `parser`: the fields of a dataclass as flags; `help`: their text; `sources`: dataclasses read without importing them.
- `flags`: what a command calls to read its words: `parse_flags`, `parse_with_method`.
- `model_flags`, `measure_flags`: which model, images and measure, and how to open them.
- `exported`: an exported file in the place of a model.
- `output`: how a command answers and resumes; `render`: tables, JSON and progress as text.
"""
