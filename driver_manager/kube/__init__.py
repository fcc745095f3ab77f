"""The Cluster port on the official client. Importing it is cheap: the client library is loaded by `connect`."""

from driver_manager.kube.client import KubeCluster, connect

__all__ = ["KubeCluster", "connect"]
