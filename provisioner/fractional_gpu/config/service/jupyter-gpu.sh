# Written by `jupyter gpu setup-machine`.
case $-${SSH_CONNECTION:+ssh} in *i*ssh) echo 'The GPUs are shared: start programs with `jupyter-gpu run -- COMMAND`, and see `jupyter-gpu status`.' ;; esac
