"""Which commands there are, and what they say of themselves; imports nothing, as gtp_vit_command reads it by itself."""

# What each command does; its module, of the same name, is imported only when it runs
COMMANDS = {
    "tour": "Half a minute on a small model in the package: what it does, and a page with pictures",
    "benchmark": "Measure the speed-up of a method on this machine, layer by layer cost included",
    "evaluate": "Accuracy with a method on your images, against the unreduced model",
    "compare": "All methods at equal MACs on the same images: table, plot, page",
    "tune": "Give a target, get the schedule that changes the model least",
    "embed": "Embeddings of a folder or data set, to files; many processes, resumes",
    "export": "Write a model to a file for ONNX Runtime or OpenVINO, checked in its engine",
    "finetune": "Train with a method active, on one machine or many; no labels needed",
    "visualise": "Pictures of what is left of an image after each layer, and where the rest went",
    "demo": "A web page on this machine to play with: pictures, methods, what they do",
    "models": "List the models that can be patched",
    "methods": "List the methods and their settings",
    "macs": "Count MACs and tokens of each layer, without running the model",
    "check": "Show versions, hardware and known traps of this machine",
}

# Commands that resume where they were interrupted, if this flag says where
RESUME_FLAG = {
    "evaluate": "--results-file",
    "compare": "--output",
    "tune": "--output",
    "embed": "--output",
    "finetune": "--output",
}

HELP = """\
usage: gtp-vit COMMAND [flags]

Make a pre-trained Vision Transformer faster in one call, without finetuning.

examples:
  gtp-vit benchmark deit_small_patch16_224 --batch-size 8
  gtp-vit macs vit_base_patch8_224 --method gtp --propagate linear:10:40
  gtp-vit check

commands (gtp-vit COMMAND --help shows its flags):
{commands}
"""
