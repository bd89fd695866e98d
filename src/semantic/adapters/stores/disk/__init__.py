"""Blocks and manifests as checksummed files in one folder. See docs/store-format.md."""

from semantic.adapters.stores.disk.files import FileSystem
from semantic.adapters.stores.disk.maintenance import CheckReport, CollectReport, Problem
from semantic.adapters.stores.disk.store import DiskStore, FolderView

__all__ = ["CheckReport", "CollectReport", "DiskStore", "FileSystem", "FolderView", "Problem"]
