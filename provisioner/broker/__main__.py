"""`python -m provisioner.broker [--detach] OPTIONS-AS-JSON`: how brokers start brokers. People use `jupyter gpu broker`."""

import json
import sys

from provisioner.broker.app import BrokerOptions, run_broker, run_detached

if __name__ == "__main__":
    if sys.argv[1:2] == ["--detach"]:
        raise SystemExit(run_broker(BrokerOptions(**{**json.loads(sys.argv[2]), "detach": True})))
    raise SystemExit(run_detached(sys.argv[1]))
