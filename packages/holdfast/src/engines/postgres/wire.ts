/** The protocol, https://www.postgresql.org/docs/current/protocol-message-formats.html */
import type { SqlConnection } from "../../core/database.ts";
import { sql } from "../../core/sql.ts";
import type { Answer, Wire, WireReader } from "../../core/wire.ts";

/** Codes of messages that come before any other, and have no letter: startup, cancel, TLS, GSS. */
const unlettered = new Set([196608, 196610, 80877102, 80877103, 80877104]);

interface Message {
  readonly letter: string;
  readonly body: Buffer;
}

/** Cuts a stream into messages; what is not complete yet is kept. */
class Messages {
  #rest: Buffer = Buffer.alloc(0);

  *of(chunk: Uint8Array): Generator<Message> {
    let data: Buffer = this.#rest.length > 0 ? Buffer.concat([this.#rest, chunk]) : Buffer.from(chunk);
    while (data.length >= 5) {
      const length = data.readUInt32BE(1);
      if (data.length < length + 1) break;
      yield { letter: String.fromCharCode(data[0] as number), body: data.subarray(5, length + 1) };
      data = data.subarray(length + 1);
    }
    this.#rest = data;
  }
}

function cstring(body: Buffer, from = 0): [text: string, next: number] {
  const end = body.indexOf(0, from);
  return [body.toString("utf8", from, end), end + 1];
}

class Reader implements WireReader {
  readonly #sent = new Messages();
  readonly #received = new Messages();
  /** Texts of prepared statements. */
  readonly #prepared = new Map<string, string>();
  #under = false;

  sent(chunk: Uint8Array): string | undefined {
    const data = Buffer.from(chunk);
    // Before the login there are no letters.
    if (data.length >= 8 && unlettered.has(data.readUInt32BE(4)) && data.readUInt32BE(0) === data.length)
      return undefined;
    const texts: string[] = [];
    for (const { letter, body } of this.#sent.of(chunk)) {
      if (letter === "Q") texts.push(cstring(body)[0]);
      else if (letter === "P") {
        const [name, next] = cstring(body);
        const [text] = cstring(body, next);
        this.#prepared.set(name, text);
      } else if (letter === "B") texts.push(this.#bound(body));
    }
    if (texts.length > 0) {
      this.#under = true;
      return texts.join("; ");
    }
    // Part of what is about to be bound: held back with it.
    const begins = !this.#under && (data[0] === 0x50 || data[0] === 0x42);
    return begins ? "" : undefined;
  }

  #bound(body: Buffer): string {
    const [, afterPortal] = cstring(body);
    const [name, afterName] = cstring(body, afterPortal);
    const formats = body.readUInt16BE(afterName);
    let at = afterName + 2 + 2 * formats;
    const values: string[] = [];
    for (let count = body.readUInt16BE(at), i = ((at += 2), 0); i < count; i++) {
      const length = body.readInt32BE(at);
      at += 4;
      values.push(length < 0 ? "NULL" : body.toString("utf8", at, at + length));
      if (length > 0) at += length;
    }
    const text = this.#prepared.get(name) ?? name;
    return text.replaceAll(/\$(\d+)/g, (whole, n: string) => values[Number(n) - 1] ?? whole);
  }

  received(chunk: Uint8Array): Answer {
    const rows: string[][] = [];
    let ready = false;
    let error: string | undefined;
    for (const { letter, body } of this.#received.of(chunk)) {
      if (letter === "Z") {
        ready = true;
        this.#under = false;
      } else if (letter === "D") rows.push(rowOf(body));
      else if (letter === "E") error = /(?:^|\0)M([^\0]*)/.exec(body.toString("utf8"))?.[1];
    }
    return { ready, rows, error };
  }
}

function rowOf(body: Buffer): string[] {
  const values: string[] = [];
  let at = 2;
  for (let i = 0; i < body.readUInt16BE(0); i++) {
    const length = body.readInt32BE(at);
    at += 4;
    values.push(length < 0 ? "NULL" : body.toString("utf8", at, at + length));
    if (length > 0) at += length;
  }
  return values;
}

export const wire: Wire<SqlConnection> = {
  reader: () => new Reader(),
  async waiting(connection, ports) {
    const { rows } = await connection.query(
      sql`SELECT a.client_port AS port, array_to_string(ARRAY(SELECT b.client_port FROM pg_stat_activity b
          WHERE b.pid = ANY (pg_blocking_pids(a.pid))), ',') AS blockers
        FROM pg_stat_activity a WHERE a.client_port IN (${sql.join(ports.map((port) => sql.raw(String(port))))})
          AND a.wait_event_type = 'Lock'`,
    );
    return new Map(
      rows.map(({ port, blockers }) => [
        Number(port),
        String(blockers).split(",").filter(Boolean).map(Number),
      ]),
    );
  },
};
