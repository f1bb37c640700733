import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.List;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

/** The JDK's own HttpClient, which offers h2c with its first request: a chat, whole and streamed, in two versions. */
public class JdkClient {
    static final Pattern CONTENT = Pattern.compile("\"content\":\"((?:[^\"\\\\]|\\\\.)*)\"");

    static HttpRequest chat(boolean stream) {
        String body = "{\"model\": \"quill\", \"max_tokens\": 32, \"temperature\": 0, \"stream\": " + stream
            + ", \"messages\": [{\"role\": \"user\", \"content\": \"Tell me a story.\"}]}";
        return HttpRequest.newBuilder(URI.create(System.getenv("QUILL_URL") + "/v1/chat/completions"))
            .header("content-type", "application/json").POST(HttpRequest.BodyPublishers.ofString(body)).build();
    }

    static String contents(List<String> lines) {
        return lines.stream().flatMap(line -> CONTENT.matcher(line).results()).map(found -> found.group(1))
            .collect(Collectors.joining());
    }

    static String error(HttpClient.Version version) throws Exception {
        HttpClient client = HttpClient.newBuilder().version(version).build();
        HttpResponse<String> whole = client.send(chat(false), HttpResponse.BodyHandlers.ofString());
        if (whole.statusCode() != 200) return whole.statusCode() + " " + whole.body();
        for (int turn = 0; turn < 2; turn++) {
            var answer = client.send(chat(true), HttpResponse.BodyHandlers.ofLines());
            List<String> lines = answer.body().filter(line -> !line.isEmpty()).toList();
            if (!lines.get(lines.size() - 1).equals("data: [DONE]")) return "no end: " + lines;
            if (lines.size() < 5) return "few events: " + lines;
            String text = contents(lines), all = contents(List.of(whole.body()));
            if (text.isEmpty() || !text.equals(all)) return "streamed " + text + ", whole " + all;
        }
        return null;
    }

    public static void main(String[] arguments) {
        for (HttpClient.Version version : HttpClient.Version.values()) {
            String error;
            try {
                error = error(version);
            } catch (Exception caught) {
                error = caught.toString();
            }
            String said = error == null ? "null" : "\"" + error.replaceAll("[^ -~]|[\"\\\\]", " ") + "\"";
            System.out.println("{\"check\": \"a streamed chat is the whole one, " + version + "\", \"error\": " + said + "}");
        }
    }
}
