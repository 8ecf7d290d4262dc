"""Pairs of frames with optical flow, and RAFT: a table of SR-STE."""
