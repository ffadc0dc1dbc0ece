package delaylake;

import java.time.Instant;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * The id of a message of a source topic. Its text is {@code ledger:entry:partition:batchIndex}.
 *
 * @param partition -1: the topic has no partitions
 * @param batchIndex -1: the entry is one message, or all of its messages are meant
 * @param deliverAt when the message is due, null if that is not known; ignored in comparisons
 */
public record MessageId(long ledgerId, long entryId, int partition, int batchIndex, Instant deliverAt) implements Named {
    private static final Pattern ID = Pattern.compile("(\\d{1,18}):(\\d{1,18})(?::(-?\\d{1,9}))?(?::(-?\\d{1,9}))?");

    /** Reads {@code ledger:entry}, {@code ledger:entry:batchIndex} or {@code ledger:entry:partition:batchIndex}. */
    public static MessageId parse(String text) {
        Matcher found = ID.matcher(text);
        if (!found.matches()) {
            throw new IllegalArgumentException("no message id: " + text + " (ledger:entry[:batchIndex])");
        }
        boolean hasBoth = found.group(4) != null;
        String partition = hasBoth ? found.group(3) : "-1";
        String batchIndex = hasBoth ? found.group(4) : found.group(3) == null ? "-1" : found.group(3);
        return new MessageId(
            Long.parseLong(found.group(1)), Long.parseLong(found.group(2)),
            Math.max(Integer.parseInt(partition), -1), Math.max(Integer.parseInt(batchIndex), -1), null);
    }

    /** The same id with a time. */
    public MessageId at(Instant time) {
        return new MessageId(ledgerId, entryId, partition, batchIndex, time);
    }

    /** The id in the topic or partition that a path names. */
    String inTopic() {
        return ledgerId + ":" + entryId + (batchIndex < 0 ? "" : ":" + batchIndex);
    }

    @Override
    public String toString() {
        return ledgerId + ":" + entryId + ":" + partition + ":" + batchIndex;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof MessageId && toString().equals(other.toString());
    }

    @Override
    public int hashCode() {
        return toString().hashCode();
    }
}
