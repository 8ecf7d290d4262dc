"""N:M products on CPUs and GPUs, their choice by measurement, and packed files."""
