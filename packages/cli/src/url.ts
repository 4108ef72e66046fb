/** Which database a verb is about. */
import type { Command } from "commander";

export interface UrlOption {
  readonly url?: string;
}

export interface Given {
  readonly url: string;
  /** Where it was found: an option, or the name of a variable. */
  readonly by: string;
}

const variables = ["HOLDFAST_URL", "DATABASE_URL"];

/** `--url`, as every verb that needs a database has it. */
export function urlOption(command: Command): Command {
  return command.option("--url <url>", "the database (default: HOLDFAST_URL, or DATABASE_URL)");
}

export function given(url: string | undefined): Given | undefined {
  if (url !== undefined) return { url, by: "--url" };
  for (const by of variables) {
    const found = process.env[by];
    if (found) return { url: found, by };
  }
  return undefined;
}

/** Whoever has the wrong variable set should see it, but not the password in the log. */
export function withoutSecrets(url: string): string {
  if (!URL.canParse(url)) return url.includes("@") ? "the database" : url;
  const { protocol, username, host, pathname } = new URL(url);
  if (protocol === "file:" || protocol === "sqlite:") return url;
  return `${protocol}//${username === "" ? "" : `${username}@`}${host}${pathname}`;
}
