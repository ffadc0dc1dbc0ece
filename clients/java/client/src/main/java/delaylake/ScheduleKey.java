package delaylake;

/** The message that waits under a schedule key. */
public record ScheduleKey(String key) implements Named {}
