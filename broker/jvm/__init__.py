"""The files that a JVM starts with: JARs, and an archive of its classes."""
