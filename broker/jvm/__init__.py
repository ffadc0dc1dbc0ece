"""What a JVM is started with: JARs, and an archive of its classes."""
