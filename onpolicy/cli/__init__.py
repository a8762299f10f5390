"""The commands of the CLI: one file each, with a `main(argv) -> exit code`.

`main` dispatches by a command's name. `parse` and `yaml_file` turn its arguments into a typed
configuration, whose flags are in `onpolicy/config`. The work is in `onpolicy/run` or `onpolicy/report`,
which a command imports after the configuration has been checked.
"""
