#!/bin/bash
# What Spark starts in its pods with `driver ...` or `executor`; anything else is run as it is.
set -u
umask 077

case "${1:-}" in
  driver)
    shift
    # SIGTERM is for the program, a child of Spark's JVM, which then finishes its batch; the JVM would end in its middle.
    # As long as it has not started the program, there is nothing to finish.
    trap 'pkill -TERM -P $! -f "/jobs/(__main__|cli)\.py " || kill -TERM $!' TERM
    "$SPARK_HOME/bin/spark-submit" --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
      --deploy-mode client "$@" &
    while kill -0 $! 2>/dev/null; do
      wait $!
    done
    wait $! # the last one may have been ended by the signal itself, with another status
    exit $?
    ;;
  executor)
    options=()
    for name in "${!SPARK_JAVA_OPT_@}"; do
      options+=("${!name}")
    done
    exec tini -s -- java "${options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
      -cp "${SPARK_CONF_DIR:-$SPARK_HOME/conf}:$SPARK_HOME/jars/*:${SPARK_CLASSPATH:-}:$PWD" \
      org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
      --driver-url "$SPARK_DRIVER_URL" \
      --executor-id "$SPARK_EXECUTOR_ID" \
      --cores "$SPARK_EXECUTOR_CORES" \
      --app-id "$SPARK_APPLICATION_ID" \
      --hostname "$SPARK_EXECUTOR_POD_IP" \
      --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
      --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
  *)
    # Not as the first process, which ignores a signal until it has a handler for it, and has to reap others' children.
    exec tini -s -- "$@"
    ;;
esac
