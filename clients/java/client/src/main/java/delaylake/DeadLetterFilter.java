package delaylake;

import java.time.Instant;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Which dead letters are re-driven: those of a subscription for which all that is given holds. */
public final class DeadLetterFilter {
    final Map<String, Object> body = new LinkedHashMap<>();
    long limit = 10_000;
    boolean isDryRun;
    String requestId; // null: each call has one of its own

    private DeadLetterFilter(String subscription) {
        body.put("subscription", subscription);
    }

    /** All of a subscription. */
    public static DeadLetterFilter subscription(String name) {
        return new DeadLetterFilter(name);
    }

    public DeadLetterFilter key(String key) {
        return with("key", key);
    }

    /** Only those with all of these properties. */
    public DeadLetterFilter properties(Map<String, String> properties) {
        return with("properties", Map.copyOf(properties));
    }

    /** Only these, by their property {@code delaylake.messageId}. */
    public DeadLetterFilter messages(List<MessageId> ids) {
        return with("messageIds", ids.stream().map(id -> id.ledgerId() + ":" + id.entryId() + ":" + id.batchIndex()).toList());
    }

    /** Only those with this text in a reason of their retries. */
    public DeadLetterFilter reason(String text) {
        return with("reason", text);
    }

    /** Only those that became dead letters from then on. */
    public DeadLetterFilter publishedFrom(Instant time) {
        return with("publishedFrom", Json.millis(time));
    }

    public DeadLetterFilter publishedBefore(Instant time) {
        return with("publishedBefore", Json.millis(time));
    }

    /** If more match, nothing is done; 10,000 without it. */
    public DeadLetterFilter limit(long most) {
        if (most < 1) throw new IllegalArgumentException("limit must be 1 or more: " + most);
        limit = most;
        return this;
    }

    /** Only counts the matching dead letters. */
    public DeadLetterFilter dryRun() {
        isDryRun = true;
        return this;
    }

    /** That of a call that was broken off: what it has sent back is not sent again. */
    public DeadLetterFilter requestId(String id) {
        requestId = id;
        return this;
    }

    private DeadLetterFilter with(String name, Object value) {
        body.put(name, value);
        return this;
    }
}
