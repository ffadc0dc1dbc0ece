import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.transaction.Transaction;

/**
 * Sends words to a topic: each in a transaction of its own, which is aborted for one that begins with `-`; one that begins
 * with `+` in chunks of two bytes. Arguments: URL, topic, words.
 */
public class Transactions {
    public static void main(String[] arguments) throws Exception {
        try (PulsarClient client =
                        PulsarClient.builder().serviceUrl(arguments[0]).enableTransaction(true).build();
                Producer<byte[]> producer =
                        client.newProducer().topic(arguments[1]).sendTimeout(0, TimeUnit.SECONDS).create();
                Producer<byte[]> chunking =
                        client.newProducer()
                                .topic(arguments[1])
                                .enableBatching(false)
                                .enableChunking(true)
                                .chunkMaxMessageSize(2)
                                .create()) {
            for (int i = 2; i < arguments.length; i++) {
                byte[] word = arguments[i].getBytes();
                if (arguments[i].startsWith("+")) {
                    chunking.send(word);
                    continue;
                }
                Transaction transaction = client.newTransaction().build().get();
                producer.newMessage(transaction).value(word).send();
                (arguments[i].startsWith("-") ? transaction.abort() : transaction.commit()).get();
            }
        }
    }
}
