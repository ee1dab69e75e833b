"""`python -m fractional_gpu.broker [--detach] OPTIONS-AS-JSON`: how brokers start brokers. People use `jupyter gpu broker`."""

import gc
import json
import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["--detach"]:
        from fractional_gpu.broker.process.restarting import BrokerOptions, start_detached

        raise SystemExit(start_detached(BrokerOptions(**json.loads(sys.argv[2]))))
    gc.disable()  # of what is imported nothing is garbage, and a kernel's start waits for this
    from fractional_gpu.broker.process.app import run_detached

    gc.freeze()
    gc.enable()
    raise SystemExit(run_detached(sys.argv[1]))
