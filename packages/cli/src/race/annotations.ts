/** What GitHub shows beside the lines of a pull request. */
import type { Finding } from "./findings.ts";

/** The runner reads these lines from the log. */
export function annotation({ level, title, message, place: { file, line, column } }: Finding): string {
  const properties = Object.entries({ file, line, col: column, title })
    .map(([name, value]) => `${name}=${property(String(value))}`)
    .join(",");
  return `::${level} ${properties}::${data(message)}`;
}

const data = (text: string) => text.replaceAll("%", "%25").replaceAll("\r", "%0D").replaceAll("\n", "%0A");
const property = (text: string) => data(text).replaceAll(":", "%3A").replaceAll(",", "%2C");
