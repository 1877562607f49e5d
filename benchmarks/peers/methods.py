"""What benchmarks/peers trains; of these, what sends compressed steps too."""

METHODS = ("DDP", "DDP, fp16 hook", "FSDP2", "PowerSGD rank 1", "PowerSGD rank 4", "OnebitAdam")
COMPRESSED = METHODS[3:]
