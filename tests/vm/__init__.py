"""Tests in a virtual machine: a real kernel that loads and unloads real modules. What a test file here does runs in the guest."""
