"""Pairs of sentences, and fairseq's Transformer: tables of STEP, S-STE and the gradient-flow
recipes. It needs fairseq (``nmrun[translation]``).
"""
