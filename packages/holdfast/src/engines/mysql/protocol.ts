/** The protocol, https://mariadb.com/docs/server/reference/clientserver-protocol */
import type { SqlConnection } from "../../seam/database.ts";
import { UnsupportedError } from "../../seam/errors.ts";
import { sql } from "../../seam/sql.ts";
import type { ProtocolAnswer, Autocommit, Protocol, ProtocolReader } from "../../seam/protocol-reader.ts";
import { describe, waiting } from "./blockers.ts";
import { effects } from "./effects.ts";
import {
  ProtocolExchange,
  type Heard,
  type ExchangeKind,
  type PreparedStatement,
  type ProtocolSession,
  inTransaction,
  isEof,
} from "./exchange.ts";
import { Cursor, type Packet, Packets, type Type, type Value, isSet, valueOf } from "./packets.ts";
import { keep } from "./keep.ts";
import { settle } from "./purge.ts";
import { routineEffects } from "./routine-effects.ts";
import { related } from "./related.ts";
import { relay } from "./relay.ts";

/** Commands, https://dev.mysql.com/doc/dev/mysql-server/latest/my__command_8h.html; those of MariaDB are above 0xf0. */
const command = {
  sleep: 0x00,
  quit: 0x01,
  query: 0x03,
  fieldList: 0x04,
  changeUser: 0x11,
  prepare: 0x16,
  execute: 0x17,
  longData: 0x18,
  close: 0x19,
  fetch: 0x1c,
  reset: 0x1f,
  bulkExecute: 0xfa,
} as const;

/** Those that read or write, which a test holds back. */
const held: ReadonlySet<number | undefined> = new Set([command.query, command.execute, command.bulkExecute]);
const unanswered: ReadonlySet<number | undefined> = new Set([command.quit, command.longData, command.close]);

const deprecateEof = 1 << 24;
const ssl = 1 << 11;

/** Of a prepared statement in place of its id: the one that was prepared last. */
const lastPrepared = 0xffffffff;
/** In an execute: the number of parameters comes with it, and a name with each. */
const countsParameters = 0x08;

interface Executed {
  readonly id: number;
  readonly body: Buffer;
  readonly prepared: PreparedStatement;
  readonly absent: ReadonlySet<number> | undefined;
  /** By its text. */
  unknown: boolean;
}

export class MysqlReader implements ProtocolReader {
  readonly #sent = new Packets();
  readonly #received = new Packets();
  readonly #session: ProtocolSession = {
    eofs: undefined,
    uploading: false,
    inside: undefined,
    prepared: new Map(),
  };
  /** Commands that are not answered yet. */
  readonly #exchanges: ProtocolExchange[] = [];
  #last: PreparedStatement | undefined;
  #executed: Executed | undefined;
  /** Parameters that came before their statement is executed, by its id. */
  readonly #long = new Map<number, Set<number>>();
  /** Of the server, if its greeting was heard. */
  #capabilities: number | undefined;
  /** The client has said what it is capable of. */
  #introduced = false;
  #encrypted = false;
  /** CLIENT_QUERY_ATTRIBUTES: each query says how many it has. */
  #attributes = false;
  /** A statement was told of before its end has come. */
  #begun = false;
  /** The packet that is an EOF if it comes: see `#prepares`. */
  #stray: number | undefined;

  sent(chunk: Uint8Array): string | undefined {
    if (this.#encrypted) return undefined;
    if (!this.#sent.unfinished) refuseCompressed(chunk);
    const texts: string[] = [];
    for (const packet of this.#sent.of(chunk)) {
      const text = this.#sends(packet);
      if (text !== undefined) texts.push(text);
    }
    const begins = this.#begins();
    if (texts.length > 0) return texts.join("; ");
    return begins ? "" : undefined;
  }

  /** The first piece of a statement, with the rest to come: it must be held back as well. */
  #begins(): boolean {
    const unfinished = this.#sent.unfinished;
    const before = this.#begun;
    const mayBe = unfinished?.first === undefined || held.has(unfinished.first);
    this.#begun = unfinished?.sequence === 0 && mayBe && !this.#session.uploading;
    return this.#begun && !before;
  }

  #sends({ sequence, body }: Packet): string | undefined {
    this.#begun = false;
    if (this.#session.uploading) return undefined;
    if (sequence !== 0) return this.#logsIn(body);
    this.#introduced = true;
    const code = body[0] ?? command.sleep;
    if (code === command.query) return this.#queries(body);
    if (code === command.execute || code === command.bulkExecute) return this.#executes(body);
    if (code === command.prepare) this.#prepares(body);
    else if (code === command.longData) this.#feeds(body);
    else if (code === command.close) this.#session.prepared.delete(new Cursor(body, 1).int(4));
    else if (!unanswered.has(code)) this.#asks(code, body);
    return undefined;
  }

  #expect(kind: ExchangeKind, prepared?: PreparedStatement): void {
    this.#exchanges.push(new ProtocolExchange(kind, prepared));
  }

  /** It belongs to what is being answered, unless nothing is. */
  #logsIn(body: Buffer): undefined {
    if (this.#exchanges.length === 0) this.#expect("login");
    // Its first packet; others have nothing but passwords.
    if (this.#introduced || this.#exchanges[0]?.kind !== "login" || body.length < 32) return;
    this.#introduced = true;
    const flags = body.readUInt32LE(0);
    if (body.length === 32 && (flags & ssl) !== 0) this.#encrypted = true;
    if ((flags & (this.#capabilities ?? flags) & deprecateEof) === 0) this.#session.eofs ??= true;
    else if (this.#capabilities !== undefined) this.#session.eofs ??= false;
  }

  #queries(body: Buffer): string {
    this.#expect("text");
    this.#executed = undefined;
    const cursor = new Cursor(body, 1);
    // No text has this second character: it is the number of sets of attributes, which is always one.
    if (body[2] === 0x01) {
      this.#attributes = true;
      const count = cursor.length() ?? 0;
      cursor.length();
      if (count > 0) parameters(cursor, count, { named: true });
    }
    return cursor.rest().toString("utf8");
  }

  #prepares(body: Buffer): void {
    this.#last = { text: body.toString("utf8", 1), columns: [] };
    this.#expect("prepare", this.#last);
  }

  /** The value is not sent again when the statement is executed. */
  #feeds(body: Buffer): void {
    const cursor = new Cursor(body, 1);
    const id = cursor.int(4);
    const known = this.#long.get(id) ?? new Set<number>();
    this.#long.set(id, known.add(cursor.int(2)));
  }

  #executes(body: Buffer): string {
    const id = new Cursor(body, 1).int(4);
    const known = id === lastPrepared ? this.#last : this.#session.prepared.get(id);
    // It was prepared before we listened.
    const prepared = known ?? { text: `EXECUTE #${id}`, columns: [] };
    if (!known) this.#session.prepared.set(id, prepared);
    this.#expect("binary", prepared);
    this.#executed = { id, body, prepared, absent: this.#long.get(id), unknown: !known };
    this.#long.delete(id);
    return this.text();
  }

  /** Of the prepared statement that was executed last. */
  text(): string {
    if (!this.#executed) return "";
    const { body, prepared, absent } = this.#executed;
    if (body[0] === command.bulkExecute) return prepared.text;
    return filled(prepared.text, this.#values(new Cursor(body, 5), prepared, absent));
  }

  /** MariaDB does not tell. */
  get unknown(): string | undefined {
    if (!this.#executed?.unknown) return undefined;
    return `SELECT sql_text FROM performance_schema.prepared_statements_instances
      WHERE statement_id = ${this.#executed.id} AND owner_thread_id = PS_CURRENT_THREAD_ID()`;
  }

  learn([row]: ProtocolAnswer["rows"]): void {
    if (!this.#executed) return;
    this.#executed.unknown = false;
    if (row?.[0] !== undefined) this.#executed.prepared.text = row[0];
  }

  #values(cursor: Cursor, prepared: PreparedStatement, absent?: ReadonlySet<number>): Values {
    const counts = (cursor.int(1) & countsParameters) !== 0;
    if (counts) this.#attributes = true;
    cursor.int(4);
    const count = counts ? cursor.length() : (prepared.parameters ?? placeholders(prepared.text));
    if (!count) return [];
    const found = parameters(cursor, count, { named: counts, types: prepared.types, absent });
    if (found.types) prepared.types = found.types;
    return found.values;
  }

  #asks(code: number, body: Buffer): void {
    if (code === command.changeUser || code === command.reset) this.#session.prepared.clear();
    if (code === command.changeUser) this.#expect("login");
    else if (code === command.fieldList) this.#expect("list");
    else if (code === command.fetch)
      this.#expect("fetch", this.#session.prepared.get(new Cursor(body, 1).int(4)));
    else this.#expect("packet");
  }

  received(chunk: Uint8Array): ProtocolAnswer {
    const heard: Heard = { rows: [], error: undefined, affected: undefined };
    let answered = false;
    if (!this.#encrypted)
      for (const packet of this.#received.of(chunk)) answered = this.#hears(packet, heard) || answered;
    return { ready: answered && this.#exchanges.length === 0, ...heard };
  }

  /** Whether it was the last packet of an answer. */
  #hears(packet: Packet, heard: Heard): boolean {
    if (this.#stray === packet.sequence && isEof(packet)) {
      this.#stray = undefined;
      this.#session.eofs = true;
      return false;
    }
    this.#stray = undefined;
    const [exchange] = this.#exchanges;
    if (!exchange) {
      this.#greets(packet);
      return false;
    }
    if (!exchange.take(packet, this.#session, heard)) return false;
    this.#exchanges.shift();
    this.#session.uploading = false;
    if (exchange.kind === "prepare" && this.#session.eofs === undefined)
      this.#stray = (packet.sequence + 1) % 256;
    return true;
  }

  /** https://dev.mysql.com/doc/dev/mysql-server/latest/page_protocol_connection_phase_packets_protocol_handshake_v10.html */
  #greets({ sequence, body }: Packet): void {
    if (sequence !== 0 || body[0] !== 0x0a) return;
    this.#expect("login");
    const cursor = new Cursor(body, body.indexOf(0) + 1);
    // Connection id, half of the scramble, a filler.
    cursor.bytes(4 + 8 + 1);
    const low = cursor.int(2);
    // Character set, status.
    cursor.bytes(3);
    this.#capabilities = (low | (cursor.int(2) << 16)) >>> 0;
  }

  get inside(): boolean | undefined {
    return this.#session.inside;
  }

  set inside(value: boolean | undefined) {
    this.#session.inside = value;
  }

  get unanswered(): number {
    return this.#exchanges.length;
  }

  /** The bytes of a statement, as this connection takes them. */
  statement(text: string): Buffer {
    return query(text, this.#attributes);
  }
}

/** https://dev.mysql.com/doc/dev/mysql-server/latest/page_protocol_basic_compression_packet.html */
function refuseCompressed(chunk: Uint8Array): void {
  const data = Buffer.from(chunk.buffer, chunk.byteOffset, chunk.byteLength);
  if (data.length < 11 || data.readUIntLE(0, 3) + 7 !== data.length) return;
  // What is too short to be worth it is sent as it is, and said to have no length; else zlib or zstd begin so.
  const compressed = data.readUIntLE(4, 3) === 0 || data[7] === 0x78 || data.readUInt32LE(7) === 0xfd2fb528;
  if (compressed)
    throw new UnsupportedError(
      "explore: this connection is compressed, so its statements cannot be read. Leave `compress` out in tests.",
    );
}

type Values = readonly (Value | undefined)[];

interface Binding {
  /** Each has a name. */
  readonly named: boolean;
  /** Named earlier, if they are not now. */
  readonly types?: readonly Type[] | undefined;
  /** Values that are not here. */
  readonly absent?: ReadonlySet<number> | undefined;
}

/** https://dev.mysql.com/doc/dev/mysql-server/latest/page_protocol_com_stmt_execute.html */
function parameters(
  cursor: Cursor,
  count: number,
  { named, types: before, absent }: Binding,
): { types?: readonly Type[] | undefined; values: Values } {
  const nulls = cursor.bytes((count + 7) >> 3);
  const types = cursor.int(1) === 1 ? typesOf(cursor, count, named) : before;
  if (!types) return { values: [] };
  const values = types.map((type, i) => {
    if (isSet(nulls, i)) return { text: "NULL", plain: true };
    return absent?.has(i) ? undefined : valueOf(cursor, type);
  });
  return { types, values };
}

function typesOf(cursor: Cursor, count: number, named: boolean): Type[] {
  return Array.from({ length: count }, () => {
    const type = { code: cursor.int(1), unsigned: (cursor.int(1) & 0x80) !== 0 };
    if (named) cursor.string();
    return type;
  });
}

/** A placeholder, or what a question mark in it does not stand for one. */
const tokens =
  /'(?:[^'\\]|\\[\s\S]|'')*'|"(?:[^"\\]|\\[\s\S]|"")*"|`[^`]*`|--\s[^\n]*|#[^\n]*|\/\*[\s\S]*?\*\/|\?/g;

function placeholders(text: string): number {
  return [...text.matchAll(tokens)].filter(([token]) => token === "?").length;
}

function filled(text: string, values: Values): string {
  let next = 0;
  return text.replaceAll(tokens, (token) => {
    if (token !== "?") return token;
    const value = values[next++];
    if (!value) return token;
    return value.plain ? value.text : `'${value.text.replaceAll("'", "''")}'`;
  });
}

function query(text: string, attributes: boolean): Buffer {
  // No attributes, in one set.
  const body = Buffer.from(`${String.fromCharCode(command.query)}${attributes ? "\0\u0001" : ""}${text}`);
  const header = Buffer.alloc(4);
  header.writeUIntLE(body.length, 0, 3);
  return Buffer.concat([header, body]);
}

/** Where the status is in what ends an answer; undefined: it is an error. */
function statusAt(body: Buffer): number | undefined {
  if (isEof({ sequence: 0, body })) return 3;
  if (body[0] !== 0x00 && body[0] !== 0xfe) return undefined;
  const cursor = new Cursor(body, 1);
  cursor.length();
  cursor.length();
  return body.length - cursor.left;
}

const autocommit: Autocommit<SqlConnection> = {
  begin: "START TRANSACTION",
  commit: "COMMIT",
  rollback: "ROLLBACK",
  together: false,
  /** In a procedure every statement is a transaction by itself; a function is a part of the statement that calls it. */
  async writers(connection) {
    const { rows } = await connection.query(
      sql`SELECT LOWER(routine_name) AS name FROM information_schema.routines
        WHERE routine_schema = DATABASE() AND routine_type = 'FUNCTION'`,
    );
    return new Set(rows.map(({ name }) => String(name)));
  },
  answer(heard, { inside, refused }) {
    if (refused) return refused;
    const answer = Buffer.from(heard);
    for (let at = 0; !inside && at + 4 <= answer.length;) {
      const end = at + 4 + answer.readUIntLE(at, 3);
      const body = answer.subarray(at + 4, end);
      const status = isEof({ sequence: 0, body }) || end === answer.length ? statusAt(body) : undefined;
      if (status !== undefined) body.writeUInt16LE(body.readUInt16LE(status) & ~inTransaction, status);
      at = end;
    }
    return answer;
  },
};

export const protocol: Protocol<SqlConnection> = {
  relay,
  reader: () => new MysqlReader(),
  statement: (text) => query(text, false),
  unlock: "DO RELEASE_ALL_LOCKS()",
  who: "SELECT CONNECTION_ID()",
  self: ([row]) =>
    row?.[0] === undefined ? undefined : { session: row[0], direct: true, serializable: false },
  waiting,
  describe,
  async cancel(connection, sessions) {
    // One that has ended meanwhile is no error of anybody.
    for (const session of sessions)
      await connection.query(sql.raw(`KILL QUERY ${Number(session)}`)).catch(() => {});
  },
  autocommit,
  // The variable has another name on each of the two, which is hidden from the other one in a comment.
  isolation: (level) =>
    level === undefined
      ? "SET SESSION /*!80000 transaction_isolation*/ /*M!100000 tx_isolation*/ = DEFAULT"
      : `SET SESSION TRANSACTION ISOLATION LEVEL ${level.toUpperCase()}`,
  related,
  effects,
  routines: routineEffects,
  lateSnapshot: true,
  keep,
  settle,
};
