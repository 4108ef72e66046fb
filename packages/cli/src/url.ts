/** Which database a verb is about. */
import type { Command } from "commander";
import { Failure } from "./failure.ts";

export interface UrlOption {
  readonly url?: string;
  /** Where Holdfast's own tables are. */
  readonly schema?: string;
}

export interface Given {
  readonly url: string;
  /** Where it was found: an option, or the name of a variable. */
  readonly by: string;
}

const variables = ["HOLDFAST_URL", "DATABASE_URL"];

/** `--url` and `--schema`, as every verb that needs a database has them. */
export function urlOption(command: Command): Command {
  return schemaOption(command.option("--url <url>", "the database (default: HOLDFAST_URL, or DATABASE_URL)"));
}

export function schemaOption(command: Command): Command {
  return command.option(
    "--schema <name>",
    "where Holdfast's own tables are: as `schema` of holdfast(…) (default: HOLDFAST_SCHEMA, or holdfast)",
  );
}

export const defaultSchema = "holdfast";

/** As it was given, or said by the environment. What cannot be one is refused by the library. */
export function givenSchema(schema: string | undefined): string {
  return schema ?? (process.env["HOLDFAST_SCHEMA"] || defaultSchema);
}

/** One of Holdfast's own tables or functions, as it is written in SQL. */
export function ownIn(kind: string, schema: string): (name: string) => string {
  if (kind !== "postgres") return (name) => `${schema}_${name}`;
  const written = schema === defaultSchema ? schema : `"${schema}"`;
  return (name) => `${written}.${name}`;
}

export function given(url: string | undefined, by = "--url"): Given | undefined {
  const found = url === undefined ? inVariables() : { url, by };
  if (found) refuseUnencoded(found);
  return found;
}

function inVariables(): Given | undefined {
  for (const by of variables) {
    const url = process.env[by];
    if (url) return { url, by };
  }
  return undefined;
}

/** Of a user and a password: what would end them, or begin something else. */
const encoded = { "#": "%23", "?": "%3F", "/": "%2F", "@": "%40", "%": "%25" } as const;

/**
 * A password with such a character in it is cut there, and the rest is taken for the host or the database: at best for none,
 * at worst for another one. Nothing of it is shown.
 */
function refuseUnencoded({ url, by }: Given): void {
  const [, rest] = /^[a-z][a-z0-9+.-]*:\/\/(.*)$/is.exec(url) ?? [];
  if (rest === undefined || /^(?:file|sqlite):/i.test(url)) return;
  const end = /[/?#]/.exec(rest)?.index ?? rest.length;
  const login = rest.slice(0, Math.max(0, rest.slice(0, end).lastIndexOf("@")));
  // Unencoded in the name of the database or of a parameter, it can only be the one before the host.
  const [path = ""] = rest.slice(end).split("?");
  const names = rest.slice(end + path.length).replaceAll(/=[^&]*/g, "");
  const cut = /@/.test(path) || /@/.test(names) || (login === "" && !URL.canParse(url) && rest.includes("@"));
  const whole = cut ? rest.slice(0, rest.lastIndexOf("@")) : login;
  const found = new Set(whole.match(/[#?/@]|%(?![0-9a-f]{2})/gi) as (keyof typeof encoded)[] | null);
  // One more at the end of the password is read as what it is.
  if (!cut) found.delete("@");
  if (found.size > 0)
    throw new Failure(
      `The user or the password in ${by} holds ${listOf([...found].map((each) => `"${each}"`))}, which means something else in a URL: percent-encode it (${[...found].map((each) => `${each} is ${encoded[each]}`).join(", ")}).`,
    );
  if (rest.includes("#"))
    throw new Failure(`${by} holds "#", after which a URL says nothing: percent-encode it (# is %23).`);
}

const listOf = (words: readonly string[]): string =>
  words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;

/**
 * An address as it may be shown: without the password, and without parameters, which may hold one too. Whoever has the wrong
 * variable set should see which database it names.
 */
export function withoutSecrets(url: string): string {
  // A file has no user: one with an @ after two slashes is of another kind.
  if (/^(?:file|sqlite):(?!\/\/[^/]*@)/i.test(url)) return url.replace(/\?.*$/s, "");
  const [, scheme, login, host = "", path = ""] =
    /^(\w+):\/\/(?:([^/?#]*)@)?([^/?#@]*)(\/[^?#@]*)?(?:[?#]|$)/.exec(url) ?? [];
  if (scheme === undefined) return "the database";
  const user = login?.split(":")[0] ?? "";
  return `${scheme}://${user === "" ? "" : `${user}@`}${host}${path}`;
}

/** What somebody typed, without what may be an address with a password in it. */
export function withoutAddresses(text: string): string {
  return text.replaceAll(
    /(--[\w-]+=)?[^\s'"]*(?:@|:\/\/|(?:password|pwd|token|secret)=)[^\s'"]*/gi,
    (_, option: string | undefined) => `${option ?? ""}…`,
  );
}
