package delaylake;

import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.TypedMessageBuilder;

/** A consumer of a destination: what it fails on comes again, later each time, and at last to the dead letters. */
public final class RetryingConsumer {
    private RetryingConsumer() {}

    /** What is done with a message. */
    public interface Work {
        void on(Message<byte[]> message) throws Exception;
    }

    /** Works on a message, and acknowledges it when that is done, or when its source topic has it for a retry. */
    public static void handle(PulsarClient client, Consumer<byte[]> consumer, Message<byte[]> message, String subscription, Work work)
            throws Exception {
        try {
            work.on(message);
        } catch (InterruptedException error) { // no failure: it is not acknowledged, and comes again
            Thread.currentThread().interrupt();
            throw error;
        } catch (Exception error) {
            try (Producer<byte[]> source = client.newProducer().topic(message.getProperty("delaylake.source")).create()) {
                TypedMessageBuilder<byte[]> again = source.newMessage().value(message.getValue())
                    .properties(message.getProperties()).property("retryOf", message.getProperty("delaylake.messageId"))
                    .property("retrySubscription", subscription).property("retryReason", error.toString());
                if (message.hasKey()) again.key(message.getKey());
                if (message.hasOrderingKey()) again.orderingKey(message.getOrderingKey());
                if (message.getEventTime() > 0) again.eventTime(message.getEventTime());
                again.send();
            }
        }
        consumer.acknowledge(message);
    }
}
