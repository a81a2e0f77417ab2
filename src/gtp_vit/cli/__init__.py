"""The command gtp-vit. A command is a module of its name and a line in `app.COMMANDS`; what commands share is here:

- `app`: the commands, errors and exit codes.
- `parser`: the fields of a dataclass as flags; `values`: of each type; `help`: their text; `sources`: dataclasses read
  without importing them.
- `flags`: what a command calls to read its words: `parse_flags`, `parse_with_method`.
- `model_flags`, `measure_flags`, `engine_flags`: which model, images, measure and engine, and how to open them.
- `output`: how a command answers and resumes; `render`: tables, JSON and progress as text.
"""
