package delaylake;

import java.net.ConnectException;
import java.net.http.HttpConnectTimeoutException;
import java.time.Duration;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/**
 * The attempts of one call: when it is repeated, and with which error it is given up. Every call is safe to repeat, since
 * a command and a message have a request id.
 */
final class Attempts {
    private static final double FIRST_PAUSE_MILLIS = 100;
    private static final double LONGEST_PAUSE_MILLIS = 3_000;
    private static final double LEAST_SHARE = 0.1; // of a call's time: no attempt begins when less is left

    private final String requestId;
    private final long deadline; // by System.nanoTime
    private final long lastBegin;
    private double pauseMillis = FIRST_PAUSE_MILLIS;
    private boolean mayBeDone;

    Attempts(String requestId, Duration timeout) {
        this.requestId = requestId;
        deadline = System.nanoTime() + timeout.toNanos();
        lastBegin = deadline - (long) (LEAST_SHARE * timeout.toNanos());
    }

    /** What is left for the next attempt, ns; never 0. */
    long nanosLeft() {
        return Math.max(deadline - System.nanoTime(), 1_000_000);
    }

    /**
     * Waits before the next attempt.
     *
     * @param error why the last one failed
     * @param retryAfterMillis what the API asks to wait
     * @throws DelayLakeException.NoAnswer the time is over, and the call may have been done
     * @throws DelayLakeException.Unavailable the time is over, and nothing was done
     */
    void pauseAfter(Throwable error, long retryAfterMillis) throws InterruptedException {
        if (error instanceof DelayLakeException.NoAnswer || !wasNotDone(error)) mayBeDone = true;
        double pause = Math.max(pauseMillis * ThreadLocalRandom.current().nextDouble(0.5, 1), retryAfterMillis);
        if (System.nanoTime() + (long) (pause * 1e6) >= lastBegin) {
            String reason = error.getMessage() == null ? error.getClass().getSimpleName() : error.getMessage();
            throw givenUp(reason, error);
        }
        pauseMillis = Math.min(2 * pauseMillis, LONGEST_PAUSE_MILLIS);
        TimeUnit.MICROSECONDS.sleep((long) (pause * 1_000));
    }

    private DelayLakeException givenUp(String reason, Throwable error) {
        DelayLakeException.Details details = DelayLakeException.Details.of(requestId, error);
        return mayBeDone
            ? new DelayLakeException.NoAnswer(reason, details)
            : new DelayLakeException.Unavailable(reason, details);
    }

    private static boolean wasNotDone(Throwable error) {
        return error instanceof DelayLakeException.Unavailable || error instanceof ConnectException
            || error instanceof HttpConnectTimeoutException;
    }
}
