package delaylake;

import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/** Which pending messages are listed: those for which all that is given holds. */
public final class PendingFilter {
    final List<Map.Entry<String, String>> query = new ArrayList<>();
    long limit = Long.MAX_VALUE;

    /** All that wait. */
    public static PendingFilter all() {
        return new PendingFilter();
    }

    public PendingFilter subscription(String name) {
        return with("subscription", name);
    }

    public PendingFilter key(String key) {
        return with("key", key);
    }

    public PendingFilter property(String name, String value) {
        return with("property", name + "=" + value);
    }

    public PendingFilter dueFrom(Instant time) {
        return with("dueFrom", "" + Json.millis(time));
    }

    public PendingFilter dueBefore(Instant time) {
        return with("dueBefore", "" + Json.millis(time));
    }

    /** {@code held}: waiting, but parked by a pause; {@code cancelled}; without it what waits. */
    public PendingFilter state(String state) {
        return with("state", state);
    }

    public PendingFilter limit(long most) {
        if (most < 1) throw new IllegalArgumentException("limit must be 1 or more: " + most);
        limit = most;
        return this;
    }

    private PendingFilter with(String name, String value) {
        query.add(Map.entry(name, value));
        return this;
    }
}
