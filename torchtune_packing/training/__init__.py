"""What the recipes share: functions and small objects, one room each; no base class, no framework.

===============  ================================================================
run.py           processes, seed, folders, the voice of a run
preflight.py     everything that can be refused before anything slow happens
data.py          data sets, order, the micro-batches of every step that is left
loading.py       from packs or samples to CPU batches
model_setup.py   model, optimizer, schedule, profiler, built from the config
step.py          the loss of a micro-batch, the update of a step
evaluate.py      validation loss
checkpoint.py    folders that are whole or not there
metrics.py       named counts and speeds, phases of a step, the progress line
stop.py          SIGTERM and Ctrl-C
example.py       one held-out document, before and after
report.py        what is printed at the end
parallel.py      ranks
===============  ================================================================
"""
