"""Lets Spark's JVM set the modes of files without starting a program for each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

_CLASS_KEY = "fs.file.impl"

# Compiled by the compiler that Spark has for its generated code.
_SOURCE = """
package delaylake;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

public class LocalFiles extends LocalFileSystem {
    public LocalFiles() {
        super(new Raw());
    }

    public static class Raw extends RawLocalFileSystem {
        public void setPermission(Path path, FsPermission mode) throws IOException {
            if (mode.getStickyBit()) {
                super.setPermission(path, mode);
            } else {
                Files.setPosixFilePermissions(
                    pathToFile(path).toPath(), PosixFilePermissions.fromString(mode.toString()));
            }
        }
    }
}
"""
_CLASS = "delaylake.LocalFiles"


def set_modes_in_jvm(spark: SparkSession) -> None:
    """Replaces the class by which Hadoop's code in Spark's JVM writes local files, unless the settings name one.

    Without its native library Hadoop's own class starts the program chmod for each file: 6 ms of CPU each, and a batch
    makes eight files. What is written is the same.
    """
    context = spark.sparkContext
    jvm, hadoop = context._jvm, context._jsc.hadoopConfiguration()
    if jvm is None or hadoop.get(_CLASS_KEY) is not None:
        return
    try:
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.cook(_SOURCE)
        conf = jvm.org.apache.hadoop.conf.Configuration(hadoop)
        conf.setClassLoader(compiler.getClassLoader())
        conf.set(_CLASS_KEY, _CLASS)
        files, local = jvm.org.apache.hadoop.fs.FileSystem, jvm.java.net.URI("file:///")
        files.get(local, conf).close()  # Hadoop keeps the one that Spark's start has made
        files.get(local, conf)  # and from now on this one
    except Py4JError as error:  # another version of Spark's: files are written all the same
        _log.info("Spark's JVM starts chmod for each file: %s", error)
