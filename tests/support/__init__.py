"""What several test files share and no fixture can give: stand-ins for servers, and servers of our own."""
