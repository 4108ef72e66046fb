/** The protocol, https://www.postgresql.org/docs/current/protocol-message-formats.html */
import type { SqlConnection } from "../../seam/database.ts";
import { sql } from "../../seam/sql.ts";
import { effects } from "./effects.ts";
import { keep } from "./locks/keep.ts";
import {
  type Autocommit,
  type Protocol,
  type ProtocolAnswer,
  type ProtocolReader,
  type Relay,
  noSession,
} from "../../seam/protocol-reader.ts";

/** Codes of messages that come before any other, and have no letter: startup, cancel, TLS, GSS. */
const unlettered = new Set([196608, 196610, 80877102, 80877103, 80877104]);

/** Of a session, in ReadyForQuery: "I", outside of any transaction. */
const idle = 0x49;

/** Of the server: what ends the answer to one message of a statement that is still open. */
const answering = "123nTCsI";

interface Message {
  readonly letter: string;
  readonly body: Buffer;
}

/** Cuts a stream into messages; what is not complete yet is kept. */
class Messages {
  #rest: Buffer = Buffer.alloc(0);

  /** With what they were cut from. */
  *whole(chunk: Uint8Array): Generator<Message & { readonly whole: Buffer }> {
    let data: Buffer = this.#rest.length > 0 ? Buffer.concat([this.#rest, chunk]) : Buffer.from(chunk);
    while (data.length >= 5) {
      const length = data.readUInt32BE(1);
      if (data.length < length + 1) break;
      const whole = data.subarray(0, length + 1);
      yield { letter: String.fromCharCode(data[0] as number), body: whole.subarray(5), whole };
      data = data.subarray(length + 1);
    }
    this.#rest = data;
  }

  of(chunk: Uint8Array): Iterable<Message> {
    return this.whole(chunk);
  }
}

function cstring(body: Buffer, from = 0): [text: string, next: number] {
  const end = body.indexOf(0, from);
  return [body.toString("utf8", from, end), end + 1];
}

/** Messages of clients after the login; of up to 64 MB, to tell them from text. */
function plausible(data: Buffer): boolean {
  if (data.length < 5) return true;
  const length = data.readUInt32BE(1);
  return "BCDEFHPQSXcdfp".includes(String.fromCharCode(data[0] as number)) && length >= 4 && length < 2 ** 26;
}

interface Begun {
  readonly name: string;
  /** What is bound; before that only what was prepared is known. */
  readonly values?: readonly string[];
}

class PostgresReader implements ProtocolReader {
  readonly #sent = new Messages();
  readonly #received = new Messages();
  /** Texts of prepared statements. */
  readonly #prepared = new Map<string, string>();
  /** Of what is under way. */
  #begun: (Begun | string)[] = [];
  #answered = true;
  #seen = false;
  /** It is no connection to a server of this kind: a request to another service, say. */
  #foreign = false;
  /** Messages of what is open that the server answers one by one, also before the end. */
  #pending = 0;
  unanswered = 0;
  open = false;
  inside: boolean | undefined;

  sent(chunk: Uint8Array): string | undefined {
    const data = Buffer.from(chunk);
    if (this.#foreign) return undefined;
    // Before the login there are no letters.
    if (data.length >= 8 && unlettered.has(data.readUInt32BE(4)) && data.readUInt32BE(0) === data.length)
      return undefined;
    if (!this.#seen && !plausible(data)) {
      this.#foreign = true;
      return undefined;
    }
    this.#seen = true;
    if (this.#answered) this.#begun = [];
    this.#answered = false;
    const before = this.#begun.length;
    for (const { letter, body } of this.#sent.of(chunk)) this.#take(letter, body);
    if (this.#begun.length > before) return this.#text(this.#begun.slice(before));
    // The first piece of a message that is longer than one write.
    return before === 0 && "PBQ".includes(String.fromCharCode(data[0] as number)) ? "" : undefined;
  }

  #take(letter: string, body: Buffer): void {
    if ("SQF".includes(letter)) this.unanswered++;
    if ("PBDEC".includes(letter)) this.#pending++;
    if (letter === "S" || letter === "Q") this.open = false;
    else if ("PBDEH".includes(letter)) this.open = true;
    if (letter === "Q") this.#begun.push(cstring(body)[0]);
    else if (letter === "P") {
      const [name, next] = cstring(body);
      this.#prepared.set(name, cstring(body, next)[0]);
      this.#begun.push({ name });
    } else if (letter === "B") {
      const bound = boundOf(body);
      const last = this.#begun.at(-1);
      if (typeof last === "object" && last.name === bound.name && !last.values) this.#begun.pop();
      this.#begun.push(bound);
    }
  }

  text(): string {
    return this.#text(this.#begun);
  }

  #text(parts: readonly (Begun | string)[]): string {
    return parts.map((part) => (typeof part === "string" ? part : this.#shown(part))).join("; ");
  }

  #shown({ name, values }: Begun): string {
    const text = this.#prepared.get(name) ?? name;
    return values
      ? text.replaceAll(/\$(\d+)/g, (whole, n: string) => literal(values[Number(n) - 1]) ?? whole)
      : text;
  }

  get unknown(): string | undefined {
    const missing = this.#begun.some((part) => typeof part === "object" && !this.#prepared.has(part.name));
    return missing ? "SELECT name, statement FROM pg_prepared_statements" : undefined;
  }

  learn(rows: ProtocolAnswer["rows"]): void {
    for (const [name = "", text = ""] of rows) this.#prepared.set(name, text);
  }

  received(chunk: Uint8Array): ProtocolAnswer {
    const rows: string[][] = [];
    let ready = false;
    let error: string | undefined;
    let deadlock = false;
    let affected: number | undefined;
    for (const { letter, body } of this.#received.of(chunk)) {
      if (letter === "Z") {
        this.unanswered = Math.max(0, this.unanswered - 1);
        this.inside = body[0] !== idle;
        ready = this.unanswered === 0;
        this.#answered = ready;
      }
      if (letter === "Z" || letter === "E") this.#pending = 0;
      else if (answering.includes(letter)) this.#pending = Math.max(0, this.#pending - 1);
      if (letter === "D") rows.push(rowOf(body));
      else if (letter === "C") affected = Number(/ (\d+)$/.exec(cstring(body)[0])?.[1] ?? NaN);
      else if (letter === "E") {
        const fields = body.toString("utf8");
        error = /(?:^|\0)M([^\0]*)/.exec(fields)?.[1];
        deadlock ||= /(?:^|\0)C40P01\0/.test(fields);
      }
    }
    const paused = this.open && !ready && this.#pending === 0 && this.unanswered === 0;
    return { ready, paused, rows, error, deadlock, affected };
  }
}

function boundOf(body: Buffer): Begun {
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
  return { name, values };
}

/** As people would write it, and so that no value can be taken for a part of the statement. */
function literal(value: string | undefined): string | undefined {
  if (value === undefined || value === "NULL" || /^-?\d{1,15}(\.\d+)?$/.test(value)) return value;
  // eslint-disable-next-line no-control-regex -- values in the binary format
  return /[\u0000-\u0008]/.test(value) ? "'…'" : `'${value.replaceAll("'", "''")}'`;
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

/** Things that the server does not bring. Qualified as all of these: the explorer may run on a database that others can write to. */
const ofUsers = sql`n.nspname OPERATOR(pg_catalog.<>) ALL ('{pg_catalog,information_schema}'::pg_catalog.name[])`;

/** "active SQL transaction": a BEGIN of the client's after ours. */
const begunTwice = /\0C25001\0/;

const autocommit: Autocommit<SqlConnection> = {
  begin: "BEGIN",
  commit: "COMMIT",
  rollback: "ROLLBACK",
  together: true,
  /** A procedure that ends transactions cannot be called inside of one. */
  async writers(connection) {
    const { rows } = await connection.query(sql`
      SELECT DISTINCT pg_catalog.lower(p.proname::pg_catalog.text) AS name FROM pg_catalog.pg_proc p
        JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
        JOIN pg_catalog.pg_language l ON l.oid OPERATOR(pg_catalog.=) p.prolang
      WHERE ${ofUsers} AND p.provolatile OPERATOR(pg_catalog.=) 'v' AND p.prokind OPERATOR(pg_catalog.=) ANY ('{f,p}'::pg_catalog."char"[])
        AND l.lanname OPERATOR(pg_catalog.<>) ALL ('{internal,c}'::pg_catalog.name[])
        AND NOT (p.prokind OPERATOR(pg_catalog.=) 'p' AND p.prosrc OPERATOR(pg_catalog.~*) '\\m(commit|rollback)\\M')`);
    return new Set(rows.map(({ name }) => String(name)));
  },
  answer(heard, { inside, refused }) {
    const parts: Buffer[] = [];
    for (const { letter, whole, body } of new Messages().whole(heard)) {
      if (letter === "Z") {
        if (refused)
          parts.push(
            ...[...new Messages().whole(refused)]
              .filter((each) => each.letter === "E")
              .map((each) => each.whole),
          );
        parts.push(inside ? whole : Buffer.from([0x5a, 0, 0, 0, 5, idle]));
      } else if (letter === "N" && begunTwice.test(`\0${body.toString("utf8")}`)) continue;
      else if (!(refused && letter === "C")) parts.push(whole);
    }
    return Buffer.concat(parts);
  },
  // Nothing that takes a snapshot, and visible to every user.
  mark: (name, level) => [
    `SET LOCAL application_name = '${name}'`,
    ...(level === undefined ? [] : [`SET TRANSACTION ISOLATION LEVEL ${level.toUpperCase()}`]),
  ],
  async marked(connection, name) {
    const { rows } = await connection.query(
      sql`SELECT a.pid::pg_catalog.text AS pid FROM pg_catalog.pg_stat_get_activity(NULL) a WHERE a.application_name OPERATOR(pg_catalog.=) ${name}::pg_catalog.text`,
    );
    return rows[0] ? String(rows[0]["pid"]) : undefined;
  },
};

/** Of clients: what the server answers at once. Before it has one of these it waits for more. */
const asking = "QSHFXpdcf";
const encrypting = { tls: 80877103, gss: 80877104 };

const relay: Relay = {
  port: 5432,
  encryption: {
    request: Buffer.from([0, 0, 0, 8, 4, 210, 22, 47]),
    granted: Buffer.from("S"),
    denied: Buffer.from("N"),
    asked(chunk) {
      const data = Buffer.from(chunk);
      if (data.length !== 8 || data.readUInt32BE(0) !== 8) return undefined;
      const code = data.readUInt32BE(4);
      if (code === encrypting.tls) return "tls";
      return code === encrypting.gss ? "other" : undefined;
    },
  },
  cutter() {
    let rest: Buffer = Buffer.alloc(0);
    let begun = false;
    return (chunk) => {
      const data = Buffer.concat([rest, chunk]);
      let end = 0;
      for (let at = 0; ;) {
        // The first message has no letter.
        const head = begun ? 1 : 0;
        if (data.length < at + head + 4) break;
        const next = at + head + data.readUInt32BE(at + head);
        if (data.length < next) break;
        if (!begun || asking.includes(String.fromCharCode(data[at] as number))) end = next;
        begun = true;
        at = next;
      }
      rest = data.subarray(end);
      return data.subarray(0, end);
    };
  },
};

export const protocol: Protocol<SqlConnection> = {
  relay,
  reader: () => new PostgresReader(),
  statement(text) {
    const body = Buffer.from(`${text}\0`);
    const head = Buffer.alloc(5);
    head.write("Q");
    head.writeUInt32BE(body.length + 4, 1);
    return Buffer.concat([head, body]);
  },
  isolation: (level) =>
    level === undefined
      ? "RESET default_transaction_isolation"
      : `SET default_transaction_isolation = '${level}'`,
  // Its owner may not, others than superusers neither: then the server's setting holds, by default a second.
  patience: (ms) => (ms === undefined ? "RESET deadlock_timeout" : `SET deadlock_timeout = ${ms}`),
  async related(connection) {
    const { rows } = await connection.query(sql`
      SELECT pg_catalog.lower(a.relname::pg_catalog.text) AS a, pg_catalog.lower(b.relname::pg_catalog.text) AS b FROM pg_catalog.pg_constraint f
        JOIN pg_catalog.pg_class a ON a.oid OPERATOR(pg_catalog.=) f.conrelid
        JOIN pg_catalog.pg_class b ON b.oid OPERATOR(pg_catalog.=) f.confrelid WHERE f.contype OPERATOR(pg_catalog.=) 'f'
      UNION ALL
      SELECT pg_catalog.lower(c.relname::pg_catalog.text), '*' FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
        WHERE ${ofUsers} AND (c.relkind OPERATOR(pg_catalog.=) ANY ('{v,m,f,p}'::pg_catalog."char"[])
          OR EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid OPERATOR(pg_catalog.=) c.oid AND NOT t.tgisinternal)
          OR EXISTS (SELECT FROM pg_catalog.pg_rewrite r WHERE r.ev_class OPERATOR(pg_catalog.=) c.oid)
          OR EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhrelid OPERATOR(pg_catalog.=) c.oid))
      UNION ALL
      SELECT pg_catalog.lower(c.relname::pg_catalog.text), pg_catalog.concat('sequence ', d.refobjid) FROM pg_catalog.pg_depend d
        JOIN pg_catalog.pg_attrdef a ON a.oid OPERATOR(pg_catalog.=) d.objid
        JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) a.adrelid
        JOIN pg_catalog.pg_class s ON s.oid OPERATOR(pg_catalog.=) d.refobjid AND s.relkind OPERATOR(pg_catalog.=) 'S'
        WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_attrdef'::pg_catalog.regclass
          AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass`);
    return rows.map(({ a, b }) => [String(a), String(b)]);
  },
  effects,
  keep,
  unlock: "SELECT pg_catalog.pg_advisory_unlock_all()",
  who: "SELECT pg_catalog.pg_backend_pid(), pg_catalog.inet_client_port(), pg_catalog.current_setting('default_transaction_isolation')",
  self([row], localPort) {
    const [session, port, isolation] = row ?? [];
    if (session === undefined) return undefined;
    return { session, direct: port === String(localPort), serializable: isolation === "serializable" };
  },
  certifies: true,
  autocommit,
  /** Every user may ask who is in the way, and not every user may see who waits. */
  async waiting(connection, sessions) {
    if (sessions.length === 0) return new Map();
    const { rows } = await connection.query(
      sql`SELECT p.pid::pg_catalog.text AS pid, pg_catalog.pg_blocking_pids(p.pid)::pg_catalog.text AS blockers FROM pg_catalog.unnest(${numbers(sessions)}) p (pid)`,
    );
    return new Map(
      rows.flatMap(({ pid, blockers }) =>
        blockers === "{}" ? [] : [[String(pid), String(blockers).slice(1, -1).split(",")] as const],
      ),
    );
  },
  async describe(connection, sessions) {
    const { rows } = await connection.query(
      sql`SELECT a.pid, a.usename AS name, a.application_name AS application, a.state, a.query FROM pg_catalog.pg_stat_activity a
        WHERE a.pid OPERATOR(pg_catalog.=) ANY (${numbers(sessions)}) ORDER BY a.pid`,
    );
    const known = rows.map(({ pid, name, application, state, query }) =>
      [
        `session ${String(pid)} of ${String(name)}`,
        ...(application ? [`application ${String(application)}`] : []),
        ...(state ? [String(state)] : []),
        ...(query ? [`its last statement: ${String(query).replaceAll(/\s+/g, " ").slice(0, 200)}`] : []),
      ].join(", "),
    );
    return sessions.includes(noSession)
      ? [...known, "a prepared transaction (see pg_prepared_xacts)"]
      : known;
  },
  async cancel(connection, sessions) {
    await connection.query(
      sql`SELECT pg_catalog.pg_cancel_backend(p.pid) FROM pg_catalog.unnest(${numbers(sessions)}) p (pid)`,
    );
  },
};

const numbers = (sessions: readonly string[]) =>
  sql.raw(`'{${sessions.map(Number).join()}}'::pg_catalog.int4[]`);
