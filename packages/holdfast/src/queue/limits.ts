/** A hundred years: more is a mistake, and more than the server's intervals take. */
export const longestMs = 100 * 365 * 86_400_000;
/** Of a payload, in bytes of JSON: it is written three times, and 500 of them may be claimed together. */
export const largest = 1024 * 1024;
export const largestTogether = 64 * largest;
/** Of a key, or of a group: an index has to hold it. */
export const longestName = 1000;
