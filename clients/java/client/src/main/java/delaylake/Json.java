package delaylake;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonGenerator;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import java.io.StringWriter;
import java.io.UncheckedIOException;
import java.time.Instant;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Reads and writes JSON as maps, lists, texts, numbers, booleans and null. */
final class Json {
    private static final JsonFactory FACTORY = new JsonFactory();

    private Json() {}

    /** Returns an object of JSON; empty where the text is none. */
    static Map<String, Object> object(String text) {
        try (JsonParser parser = FACTORY.createParser(text)) {
            return parser.nextToken() == JsonToken.START_OBJECT ? fields(parser) : Map.of();
        } catch (IOException error) {
            return Map.of();
        }
    }

    private static Object value(JsonParser parser) throws IOException {
        return switch (parser.currentToken()) {
            case START_OBJECT -> fields(parser);
            case START_ARRAY -> {
                List<Object> found = new ArrayList<>();
                while (parser.nextToken() != JsonToken.END_ARRAY) found.add(value(parser));
                yield found;
            }
            case VALUE_NUMBER_INT -> parser.getLongValue();
            case VALUE_NUMBER_FLOAT -> parser.getDoubleValue();
            case VALUE_TRUE -> true;
            case VALUE_FALSE -> false;
            case VALUE_NULL -> null;
            default -> parser.getText();
        };
    }

    private static Map<String, Object> fields(JsonParser parser) throws IOException {
        Map<String, Object> found = new LinkedHashMap<>();
        while (parser.nextToken() != JsonToken.END_OBJECT) {
            String name = parser.currentName();
            parser.nextToken();
            found.put(name, value(parser));
        }
        return found;
    }

    static String text(Object value) {
        StringWriter text = new StringWriter();
        try (JsonGenerator generator = FACTORY.createGenerator(text)) {
            write(generator, value);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        return text.toString();
    }

    private static void write(JsonGenerator generator, Object value) throws IOException {
        if (value instanceof Map<?, ?> fields) {
            generator.writeStartObject();
            for (Map.Entry<?, ?> field : fields.entrySet()) {
                generator.writeFieldName((String) field.getKey());
                write(generator, field.getValue());
            }
            generator.writeEndObject();
        } else if (value instanceof List<?> items) {
            generator.writeStartArray();
            for (Object item : items) write(generator, item);
            generator.writeEndArray();
        } else if (value instanceof Boolean flag) {
            generator.writeBoolean(flag);
        } else if (value instanceof Long number) {
            generator.writeNumber(number);
        } else {
            generator.writeString((String) value);
        }
    }

    /** Returns a time as ms since the epoch, rounded up, so that nothing is early. */
    static long millis(Instant time) {
        return time.plusNanos(999_999).toEpochMilli();
    }

    static Instant time(Object millis) {
        return millis == null ? null : Instant.ofEpochMilli((Long) millis);
    }

    static Integer number(Object value) {
        return value == null ? null : Math.toIntExact((Long) value);
    }

    @SuppressWarnings("unchecked")
    static List<Map<String, Object>> objects(Object value) {
        return value == null ? List.of() : (List<Map<String, Object>>) value;
    }

    @SuppressWarnings("unchecked")
    static List<String> texts(Object value) {
        return (List<String>) value;
    }

    @SuppressWarnings("unchecked")
    static Map<String, String> properties(Object value) {
        return (Map<String, String>) value;
    }
}
