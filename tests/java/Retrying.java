import delaylake.RetryingConsumer;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;

/** Arguments: URL, destination, subscription of the route, and how many messages to wait for; prints each. */
public class Retrying {
    public static void main(String[] arguments) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build();
                Consumer<byte[]> consumer = client.newConsumer().topic(arguments[1]).subscriptionName("worker")
                    .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe()) {
            for (int n = Integer.parseInt(arguments[3]); n > 0; n--) {
                RetryingConsumer.handle(client, consumer, consumer.receive(), arguments[2], message -> {
                    String text = new String(message.getValue()), attempt = message.getProperty("delaylake.attempt");
                    System.out.println("GOT " + text + " " + message.getKey() + " " + (attempt == null ? 0 : attempt));
                    if (text.equals("dead") || text.equals("once") && attempt == null) {
                        throw new IllegalStateException("no " + text);
                    }
                });
            }
        }
    }
}
