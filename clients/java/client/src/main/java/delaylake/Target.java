package delaylake;

import java.util.UUID;

/** For whom a command is, and the request id under which it is applied once, however often it is sent. */
public record Target(String subscription, String requestId) {
    /** All subscriptions that the topic has or gets later. */
    public static final Target ALL = new Target("*", "");

    /** One subscription. */
    public static Target subscription(String name) {
        return new Target(name, "");
    }

    /** The same under a request id of your own. */
    public Target requestId(String id) {
        return new Target(subscription, id);
    }

    Target chosen() {
        return requestId.isEmpty() ? requestId(UUID.randomUUID().toString()) : this;
    }
}
