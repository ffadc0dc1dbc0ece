package delaylake;

/** A message by its {@link MessageId}, or by its {@link ScheduleKey}. */
public sealed interface Named permits MessageId, ScheduleKey {
    /** Reads {@code ledger:entry}, {@code ledger:entry:batchIndex} or {@code ledger:entry:partition:batchIndex}. */
    static MessageId id(String text) {
        return MessageId.parse(text);
    }

    /** The message that waits under a schedule key. */
    static ScheduleKey key(String key) {
        return new ScheduleKey(key);
    }
}
