"""The files with which a JVM is started: JARs, and an archive of its classes."""
