# The broker's settings on every node (jupyter gpu broker --generate-config prints all of them).
c.GPUBroker.seats_required = True  # no kernel without a pod that asked for a share
c.GPUBroker.idle_exit = "never"
c.GPUBroker.pools = {
    "default": {"fractions": ["1/8", "1/4", "1/2", "1"], "oversubscription": 4},
}
