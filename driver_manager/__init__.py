"""driver-manager frees a Kubernetes node of everything that uses the NVIDIA driver, and puts it all back."""

__version__ = "0.1.0"
