"""The commands of the CLI: one file each, with a `main(argv) -> exit code`.

`main` chooses one by its name; `parse` and `yaml_file` make a typed configuration of its arguments,
with the flags that stand in `onpolicy/config`; its work is in `onpolicy/run` or `onpolicy/report`, which
it imports when the configuration is known to be sound.
"""
