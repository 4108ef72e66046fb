/** Answers of the server, https://mariadb.com/docs/server/reference/clientserver-protocol/4-server-response-packets */
import { Cursor, type Packet, type Type, binaryRow, textRow, typeOf } from "./packets.ts";

/** What a command is answered with. */
export type ExchangeKind =
  /** One packet. */
  | "packet"
  /** Packets until the session is, or is not, let in. */
  | "login"
  /** Packets until an EOF. */
  | "list"
  /** Results of a statement, with its values as text. */
  | "text"
  /** Results of a prepared statement. */
  | "binary"
  /** Rows of a cursor. */
  | "fetch"
  | "prepare";

/** A prepared statement. */
export interface PreparedStatement {
  text: string;
  /** Undefined until the server has said it. */
  parameters?: number;
  columns: readonly Type[];
  /** Of the parameters, as the client named them last. */
  types?: readonly Type[];
}

/** What is true for all exchanges of a connection. */
export interface ProtocolSession {
  /**
   * Definitions of columns are followed by an EOF packet: it depends on CLIENT_DEPRECATE_EOF, which was settled at
   * the login. If that was not heard, then undefined until it shows.
   */
  eofs: boolean | undefined;
  /** The client sends a file. */
  uploading: boolean;
  /** In a transaction, as the server has said last. */
  inside: boolean | undefined;
  readonly prepared: Map<number, PreparedStatement>;
}

/** What was read so far. */
export interface Heard {
  readonly rows: string[][];
  error: string | undefined;
  deadlock?: boolean;
  /** Rows. */
  affected: number | undefined;
}

/** ER_LOCK_DEADLOCK. */
const deadlock = 1213;

export const inTransaction = 0x0001;
const autocommits = 0x0002;
const moreResults = 0x0008;
const cursorExists = 0x0040;

/** Only with this length is it not the OK packet that has taken its place. */
export function isEof({ body }: Packet): boolean {
  return body[0] === 0xfe && body.length === 5;
}

/** A command, and the packets that answer it. */
export class ProtocolExchange {
  readonly kind: ExchangeKind;
  readonly #prepared: PreparedStatement | undefined;
  #phase: "header" | "columns" | "columns end" | "rows";
  /** Definitions to come. */
  #left = 0;
  #parameters = 0;
  /** The last parameter was the last packet: now it shows whether an EOF follows. */
  #listed = false;
  #columns: Type[] = [];

  constructor(kind: ExchangeKind, prepared?: PreparedStatement) {
    this.kind = kind;
    this.#prepared = prepared;
    this.#phase = kind === "fetch" ? "rows" : "header";
  }

  /** Whether it was the last packet. */
  take(packet: Packet, session: ProtocolSession, heard: Heard): boolean {
    if (packet.body[0] === 0xff) return failed(packet.body, heard);
    if (this.kind === "packet" || this.kind === "login") {
      if (packet.body[0] === 0x00) note(session, statusOf(packet.body));
      return this.kind === "packet" || packet.body[0] === 0x00;
    }
    if (this.kind === "list") return packet.body[0] === 0xfe;
    if (this.kind === "prepare") return this.#prepares(packet, session);
    return this.#results(packet, session, heard);
  }

  #results(packet: Packet, session: ProtocolSession, heard: Heard): boolean {
    const { body } = packet;
    if (this.#phase === "header") {
      if (body[0] === 0x00) heard.affected = new Cursor(body, 1).length();
      return this.#header(body, session);
    }
    if (this.#phase === "columns") {
      this.#columns.push(typeOf(body));
      if (this.#columns.length === this.#left) this.#phase = "columns end";
      return false;
    }
    if (this.#phase === "columns end") {
      if (this.#prepared) this.#prepared.columns = this.#columns;
      this.#phase = "rows";
      session.eofs = isEof(packet);
      if (session.eofs) return (statusOf(body) & cursorExists) !== 0;
    }
    // A row that begins so has a value of 16 MB.
    if (body[0] === 0xfe && body.length < 0xffffff) return this.#ends(statusOf(body), session);
    heard.rows.push(this.kind === "text" ? textRow(body) : binaryRow(body, this.#types()));
    return false;
  }

  #types(): readonly Type[] {
    return this.kind === "fetch" ? (this.#prepared?.columns ?? []) : this.#columns;
  }

  #header(body: Buffer, session: ProtocolSession): boolean {
    if (body[0] === 0x00) {
      session.uploading = false;
      return this.#ends(statusOf(body), session);
    }
    if (body[0] === 0xfb) {
      session.uploading = true;
      return false;
    }
    const cursor = new Cursor(body);
    this.#left = cursor.length() ?? 0;
    // MARIADB_CLIENT_CACHE_METADATA: one byte more, which says whether the client has to be told the columns again.
    const told = cursor.left === 0 || cursor.int(1) !== 0;
    this.#columns = told ? [] : [...(this.#prepared?.columns ?? [])];
    this.#phase = told ? "columns" : "columns end";
    return false;
  }

  #ends(status: number, session: ProtocolSession): boolean {
    note(session, status);
    this.#phase = "header";
    return (status & moreResults) === 0;
  }

  #prepares(packet: Packet, session: ProtocolSession): boolean {
    if (this.#phase === "header") return this.#prepareHeader(packet.body, session);
    const eof = isEof(packet);
    if (eof || this.#listed) session.eofs = eof;
    if (eof) this.#listed = false;
    else this.#define(packet.body);
    const over = this.#parameters === 0 && this.#left === 0;
    // If it is not known whether an EOF comes yet, it is left to whoever reads the next packet.
    return over && (eof || session.eofs !== true);
  }

  #define(body: Buffer): void {
    this.#listed = this.#parameters === 1;
    if (this.#parameters > 0) this.#parameters--;
    else {
      this.#left--;
      this.#columns.push(typeOf(body));
    }
  }

  #prepareHeader(body: Buffer, { prepared }: ProtocolSession): boolean {
    const cursor = new Cursor(body, 1);
    const id = cursor.int(4);
    this.#left = cursor.int(2);
    this.#parameters = cursor.int(2);
    this.#phase = "columns";
    if (this.#prepared) {
      this.#prepared.parameters = this.#parameters;
      this.#prepared.columns = this.#columns;
      prepared.set(id, this.#prepared);
    }
    return this.#left === 0 && this.#parameters === 0;
  }
}

/** Who turned autocommit off is always in one. */
function note(session: ProtocolSession, status: number): void {
  session.inside = (status & inTransaction) !== 0 || (status & autocommits) === 0;
}

/** Of an OK or EOF packet. */
function statusOf(body: Buffer): number {
  if (body[0] === 0xfe && body.length === 5) return body.readUInt16LE(3);
  const cursor = new Cursor(body, 1);
  cursor.length();
  cursor.length();
  return cursor.int(2);
}

/** Error 0xffff is none: it tells how far a statement has come. */
function failed(body: Buffer, heard: Heard): boolean {
  const cursor = new Cursor(body, 1);
  const code = cursor.int(2);
  if (code === 0xffff) return false;
  if (code === deadlock) heard.deadlock = true;
  const text = cursor.rest().toString("utf8");
  heard.error ??= text.startsWith("#") ? text.slice(6) : text;
  return true;
}
