"""What the command line does, as functions: runs and sweeps in ``runs``, tables and pictures in
``reports``. ``nmrun.run`` and the other names of the package lead here.
"""
