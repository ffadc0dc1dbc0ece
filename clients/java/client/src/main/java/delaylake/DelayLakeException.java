package delaylake;

import java.time.Instant;
import java.util.List;

/** The base of all errors of this package. A wrong argument is an IllegalArgumentException instead. */
public class DelayLakeException extends RuntimeException {
    private static final long serialVersionUID = 1;

    private final transient List<Outcome> outcomes;
    private final String requestId;
    private final transient Instant deliverAt;

    DelayLakeException(String reason, Details details) {
        super(reason, details.cause());
        this.outcomes = List.copyOf(details.outcomes());
        this.requestId = details.requestId();
        this.deliverAt = details.deliverAt();
    }

    /** The outcome for each message and subscription, if there are any: some may be done. */
    public List<Outcome> outcomes() {
        return outcomes == null ? List.of() : outcomes;
    }

    /** The request id with which the same call can be repeated; empty: there is none. */
    public String requestId() {
        return requestId;
    }

    /** The new time of a reschedule, else null. To repeat a call that had a delay, give this as its time. */
    public Instant deliverAt() {
        return deliverAt;
    }

    record Details(List<Outcome> outcomes, String requestId, Instant deliverAt, Throwable cause) {
        static Details of(String requestId, Throwable cause) {
            return new Details(List.of(), requestId, null, cause);
        }
    }

    /** The message has been released to the senders, which is some seconds before its time: it is delivered. */
    public static class TooLate extends DelayLakeException {
        private static final long serialVersionUID = 1;

        TooLate(String reason, Details details) {
            super(reason, details);
        }
    }

    /** There is no such topic, subscription or message. */
    public static class NotFound extends DelayLakeException {
        private static final long serialVersionUID = 1;

        NotFound(String reason, Details details) {
            super(reason, details);
        }
    }

    /** The subscription's type, Exclusive or Failover, acknowledges cumulatively: cancel instead of skip. */
    public static class NotAllowed extends DelayLakeException {
        private static final long serialVersionUID = 1;

        NotAllowed(String reason, Details details) {
            super(reason, details);
        }
    }

    /** The call makes no sense: as to reschedule a cancelled message, or to use another command's request id. */
    public static class Invalid extends DelayLakeException {
        private static final long serialVersionUID = 1;

        Invalid(String reason, Details details) {
            super(reason, details);
        }
    }

    /** The token is not accepted, or its role may not do this. */
    public static class Forbidden extends DelayLakeException {
        private static final long serialVersionUID = 1;

        Forbidden(String reason, Details details) {
            super(reason, details);
        }
    }

    /** The version of the tables that a listing reads has been removed: begin the listing again. */
    public static class Gone extends DelayLakeException {
        private static final long serialVersionUID = 1;

        Gone(String reason, Details details) {
            super(reason, details);
        }
    }

    /** The API could not be reached in the given time, and nothing was done. */
    public static class Unavailable extends DelayLakeException {
        private static final long serialVersionUID = 1;

        Unavailable(String reason, Details details) {
            super(reason, details);
        }
    }

    /** The time was over before the answer came: the call may have been done. It is safe to repeat with its requestId. */
    public static class NoAnswer extends Unavailable {
        private static final long serialVersionUID = 1;

        NoAnswer(String reason, Details details) {
            super(reason, details);
        }
    }

    /** Returns the error for a status of HTTP. */
    static DelayLakeException ofStatus(int status, String reason, Details details) {
        return switch (status) {
            case 400, 412, 413, 421, 422 -> new Invalid(reason, details);
            case 401, 403 -> new Forbidden(reason, details);
            case 404 -> new NotFound(reason, details);
            case 405 -> new NotAllowed(reason, details);
            case 410 -> new Gone(reason, details);
            case 429, 503 -> new Unavailable(reason, details);
            // A 502 is of a proxy, whose upstream may have had the call.
            case 502, 504 -> new NoAnswer(reason, details);
            default -> new DelayLakeException(reason, details);
        };
    }

    // Of several outcomes the error is that of the first here.
    private static final List<String> GRAVITY = List.of("INVALID", "NOT_ALLOWED", "TOO_LATE", "NOT_FOUND");

    /** Returns the error of the gravest outcome that is not done. */
    static DelayLakeException ofOutcomes(Details details) {
        Outcome gravest = details.outcomes().stream().filter(one -> !one.isDone())
            .min((a, b) -> Integer.compare(rank(a), rank(b))).orElseThrow();
        String reason = String.join(" ", gravest.message().toString(), gravest.subscription(), gravest.result(), gravest.reason()).strip();
        return switch (gravest.result()) {
            case "INVALID" -> new Invalid(reason, details);
            case "NOT_ALLOWED" -> new NotAllowed(reason, details);
            case "TOO_LATE" -> new TooLate(reason, details);
            case "NOT_FOUND" -> new NotFound(reason, details);
            default -> new DelayLakeException(reason, details);
        };
    }

    private static int rank(Outcome outcome) {
        int found = GRAVITY.indexOf(outcome.result());
        return found < 0 ? GRAVITY.size() : found;
    }
}
