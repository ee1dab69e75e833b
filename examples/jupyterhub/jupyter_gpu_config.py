# Pools of a teaching lab: 60 students and their teachers share two GPUs of 80 GB. Put it at /etc/jupyter/jupyter_gpu_config.py.
# Check it, and see what to expect: jupyter gpu simulate --policy jupyter_gpu_config.py ... (docs/teaching.md has the figures).

c = get_config()  # noqa

c.GPUBroker.host_memory = "256GiB"  # of 512 GiB: what the suspended kernels of a whole class may take
c.GPUBroker.pools = {
    # Everybody's: an eighth is 10 GB, enough for the exercises; most of a lesson a student types and thinks.
    "default": {
        "devices": [0, 1],
        "fractions": ["1/8", "1/4"],
        "oversubscription": 6,  # 60 students with an eighth each are 7.5 GPUs, of 12 that may be promised
        "idle_after": "on-demand",  # nobody is suspended as long as there is room
        "may_move": True,  # driver 580 or newer: a suspended kernel comes back on either GPU
        "preempt": "priorities",  # a teacher who demonstrates something does not wait
        "user_limits": {"fraction": "1/4", "leases": 4},
        "groups": {"students": {}, "teachers": {"priority": 10, "weight": 200}},
        "hours": "Mon-Fri 07:30-20:00, Sat 09:00-16:00",
        "expected_use": "10%",  # a student computes a tenth of a lesson; without it the hub reckons with a quarter
        "wait_target": "30s",
        "wait_bound": "10%",
        "when_full": "wait",
    },
}
